"use strict";
// Curves as SVG: hover and arrow keys show values, dragging or + and - zoom, the legend hides rows.
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const PAD = { left: 74, right: 14, top: 28, bottom: 40 }, HEIGHT = 300, DOTS = 90;
  // Colours that one of the three colour vision deficiencies makes equal have different dashes: blue, sky and green;
  // orange, pink and brown; green, pink, sky and grey; sky, violet and blue.
  const STYLES = ["", "", "dashed", "dotted", "dashed", "long", "dashed", ""];
  const DASHES = {
    "": {}, dashed: { "stroke-dasharray": "7 3" }, dotted: { "stroke-dasharray": "2 3" },
    long: { "stroke-dasharray": "14 3 3 3" },
  };
  const styleOf = (series) => (series.colour < 8 ? STYLES[series.colour] : "long");
  const plots = JSON.parse(document.getElementById("plot-data").textContent);

  const add = (parent, name, attributes = {}, text = "") => {
    const node = document.createElementNS(NS, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    node.textContent = text;
    parent.append(node);
    return node;
  };
  const html = (parent, name, kind, text = "") => {
    const node = document.createElement(name);
    node.className = kind;
    node.textContent = text;
    parent.append(node);
    return node;
  };
  const written = (value, digits = 5) => {
    const size = Math.abs(value);
    if (value !== 0 && (size < 9.99e-3 || size >= 1e7))
      return value.toExponential(digits - 1).replace(/\.?0*e\+?/, "e");
    return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 8 });
  };
  const ticks = (low, high, count) => {
    const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((k) => k * power).find((each) => each >= rough);
    const found = [];
    for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k++) found.push(k * step);
    return found;
  };
  const nearest = (xs, wanted) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < wanted) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - wanted) <= Math.abs(xs[high] - wanted) ? low : high;
  };

  class Curves {
    constructor(figure, plot) {
      Object.assign(this, { figure, plot, hidden: new Set(), cursor: null });
      this.place = figure.querySelector(".plot");
      this.bar = html(this.place, "div", "legend");
      this.measure("iteration");
      this.svg = add(this.place, "svg", {
        role: "img", tabindex: "0", "aria-label": `${plot.title}. ${plot.text}`,
      });
      this.tip = html(this.place, "div", "tip");
      this.tip.setAttribute("role", "status");
      this.events();
      new ResizeObserver(() => this.draw()).observe(this.place);
      this.draw();
    }

    // Curves that coincide by iteration differ in time, so they are drawn over seconds only.
    over(scale) {
      const { series, coinciding } = this.plot;
      if (scale === "iteration") return series;
      const curves = scale === "seconds" ? [...series, ...coinciding] : series;
      return curves.every((one) => one[scale].length) ? curves.map((one) => ({ ...one, x: one[scale] })) : [];
    }

    measure(scale) {
      this.scaled = scale;
      this.series = this.over(scale);
      this.hidden.clear();
      this.cursor = null;
      const ends = this.series.flatMap((s) => [s.x[0], s.x[s.x.length - 1]]);
      const room = this.plot.dots ? 0.5 : 0;
      this.whole = [Math.min(...ends) - room, Math.max(...ends) + room];
      this.range = [...this.whole];
      this.controls();
    }

    controls() {
      const { bar, series } = this;
      bar.replaceChildren();
      if (series.length > 1 || this.plot.overlap) series.forEach((one, place) => {
        const label = this.scaled === "seconds" ? one.label.replace(/ \(\d+ others? coincides?\)$/, "") : one.label;
        const button = html(bar, "button", this.named(one), label);
        button.type = "button";
        button.setAttribute("aria-pressed", "true");
        button.addEventListener("click", () => {
          if (!this.hidden.delete(place)) this.hidden.add(place);
          button.setAttribute("aria-pressed", String(!this.hidden.has(place)));
          this.draw();
        });
      });
      const scales = ["iteration", "tokens", "seconds"].filter((scale) => this.over(scale).length);
      if (scales.length > 1) {
        const choice = html(bar, "label", "scales", "over ").appendChild(document.createElement("select"));
        for (const scale of scales) choice.add(new Option(scale, scale, false, scale === this.scaled));
        choice.addEventListener("change", () => {
          this.measure(choice.value);
          this.draw();
          this.bar.querySelector("select").focus();
        });
      }
      this.reset = html(bar, "button", "reset", "whole run");
      this.reset.type = "button";
      this.reset.addEventListener("click", () => this.zoom(this.whole));
    }

    written(x) {
      return this.scaled === "tokens"
        ? x.toLocaleString("en", { notation: "compact", maximumFractionDigits: 2 }) : written(x);
    }

    named(series) {
      return `key c${series.colour % 8} ${styleOf(series)}`.trim();
    }

    events() {
      const at = (event) => {
        const box = this.svg.getBoundingClientRect();
        return this.value((event.clientX - box.left) * (this.width / box.width));
      };
      let start = null;
      this.svg.addEventListener("pointerdown", (event) => {
        start = at(event);
        this.svg.setPointerCapture(event.pointerId);
      });
      this.svg.addEventListener("pointermove", (event) => {
        this.show(at(event));
        if (start !== null) this.select(start, at(event));
      });
      this.svg.addEventListener("pointerup", (event) => {
        const end = at(event), from = start;
        start = null;
        if (from !== null && Math.abs(this.at(end) - this.at(from)) > 8)
          this.zoom([Math.min(from, end), Math.max(from, end)]);
        else this.select(0, 0);
      });
      this.svg.addEventListener("pointerleave", () => this.show(null));
      this.svg.addEventListener("blur", () => this.show(null));
      this.svg.addEventListener("dblclick", () => this.zoom(this.whole));
      this.svg.addEventListener("keydown", (event) => this.key(event));
    }

    key(event) {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
      const series = this.series.find((_, place) => !this.hidden.has(place));
      if (step && series) {
        const from = this.cursor === null ? this.range[step > 0 ? 0 : 1] : this.cursor;
        const place = nearest(series.x, from) + (this.cursor === null ? 0 : step);
        this.show(series.x[Math.max(0, Math.min(series.x.length - 1, place))]);
      } else if (factor) {
        const middle = this.cursor ?? (this.range[0] + this.range[1]) / 2;
        this.zoom(this.range.map((end) => middle + (end - middle) * factor));
      } else if (event.key === "0" || event.key === "Escape") {
        this.zoom(this.whole);
      } else return;
      event.preventDefault();
    }

    zoom([low, high]) {
      this.range = [Math.max(low, this.whole[0]), Math.min(high, this.whole[1])];
      const least = this.scaled === "iteration" ? 2 : (this.whole[1] - this.whole[0]) / 500;
      if (this.range[1] - this.range[0] < least) this.range = [...this.whole];
      this.draw();
    }

    at(x) {
      const [low, high] = this.range, span = this.width - PAD.left - PAD.right;
      return PAD.left + ((x - low) / (high - low || 1)) * span;
    }

    value(pixel) {
      const [low, high] = this.range, span = this.width - PAD.left - PAD.right;
      return low + ((pixel - PAD.left) / span) * (high - low);
    }

    high(y) {
      const [low, high] = this.levels;
      return HEIGHT - PAD.bottom - ((y - low) / (high - low)) * (HEIGHT - PAD.top - PAD.bottom);
    }

    visible() {
      const [low, high] = this.range;
      return this.series.map((series, place) => {
        const from = series.x.findIndex((x) => x >= low);
        let to = series.x.findLastIndex((x) => x <= high);
        // One point beyond either edge, so that the line continues.
        const kept = [Math.max(0, from - 1), Math.min(series.x.length - 1, to + 1)];
        const hidden = this.hidden.has(place) || from < 0 || to < from;
        return hidden ? null : { series, place, from, to, kept };
      }).filter(Boolean);
    }

    scale(parts) {
      const values = parts.flatMap(({ series, from, to }) => series.y.slice(from, to + 1)).sort((a, b) => a - b);
      if (!values.length) return [0, 1];
      let low = values[0], high = values[values.length - 1];
      if (this.plot.clip) {
        const most = values[Math.floor(0.97 * (values.length - 1))];
        if (high > low + 2.5 * (most - low) && most > low) high = most + 0.35 * (most - low);
      }
      const margin = 0.07 * (high - low) || Math.abs(high) * 0.02 || 1;
      return [low - margin, high + margin];
    }

    draw() {
      this.width = Math.max(280, Math.round(this.place.clientWidth || 860));
      this.svg.replaceChildren();
      this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
      this.reset.hidden = this.range[0] === this.whole[0] && this.range[1] === this.whole[1];
      const parts = this.visible();
      this.levels = this.scale(parts);
      this.axes();
      const id = `clip-${this.plot.name}`, clip = add(add(this.svg, "defs"), "clipPath", { id });
      add(clip, "rect", {
        x: PAD.left - 4, y: PAD.top - 4, width: this.width - PAD.left - PAD.right + 8,
        height: HEIGHT - PAD.top - PAD.bottom + 8,
      });
      const lines = add(this.svg, "g", { "clip-path": `url(#${id})` });
      parts.forEach((part) => this.curve(lines, part));
      this.marks();
      this.hover = add(this.svg, "g", { class: "hover" });
      this.show(null);
    }

    axes() {
      const { svg, plot } = this, bottom = HEIGHT - PAD.bottom;
      for (const y of ticks(...this.levels, 5)) {
        const place = this.high(y);
        add(svg, "line", { class: "grid", x1: PAD.left, x2: this.width - PAD.right, y1: place, y2: place });
        add(svg, "text", { x: PAD.left - 7, y: place + 4, "text-anchor": "end" }, written(y));
      }
      for (const x of ticks(...this.range, Math.max(2, Math.floor(this.width / 110)))) {
        if (this.scaled === "iteration" && !Number.isInteger(x)) continue;
        const text = this.scaled === "iteration" ? x.toLocaleString("en") : this.written(x);
        // A number at the right edge would be cut off.
        const isCut = this.at(x) + 3.7 * text.length > this.width;
        const place = isCut ? { x: this.width, "text-anchor": "end" } : { x: this.at(x), "text-anchor": "middle" };
        add(svg, "text", { ...place, y: bottom + 17 }, text);
      }
      add(svg, "line", { class: "axis", x1: PAD.left, x2: this.width - PAD.right, y1: bottom, y2: bottom });
      add(svg, "text", { x: this.width - PAD.right, y: HEIGHT - 6, "text-anchor": "end" }, this.scaled);
      add(svg, "text", { x: 4, y: 12 }, plot.unit);
    }

    curve(parent, { series, place, kept }) {
      const [from, to] = kept, kind = `c${series.colour % 8}`, count = to - from + 1;
      const points = [], aside = this.aside(place, count);
      for (let k = from; k <= to; k++)
        points.push([this.at(series.x[k]) + aside, this.high(series.y[k]), series.y[k]]);
      if (!this.plot.dots) {
        const path = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");
        const faint = series.means.length ? " faint" : "";
        add(parent, "path", { class: `line ${kind}${faint}`, d: `M${path}`, ...this.stroke(series, place) });
        if (faint) {
          const mean = points.map(([x], k) => `${x.toFixed(1)},${this.high(series.means[from + k]).toFixed(1)}`).join("L");
          add(parent, "path", { class: `mean ${kind}`, d: `M${mean}`, ...this.stroke(series, place) });
        }
      }
      const top = this.levels[1];
      for (const [x, y, value] of points) {
        if (value > top) {
          const tip = `M${x - 5},${PAD.top + 6}L${x},${PAD.top - 2}L${x + 5},${PAD.top + 6}Z`;
          add(parent, "path", { class: `dot beyond ${kind}`, d: tip });
        } else if ((count <= DOTS && !series.means.length) || this.plot.dots) {
          add(parent, "circle", { class: `dot ${kind}`, cx: x.toFixed(1), cy: y.toFixed(1), r: 2.6 });
        }
      }
    }

    // Dots that lie on one another are drawn beside one another, as far as there is room for it.
    aside(place, count) {
      const rows = this.series.length, span = this.width - PAD.left - PAD.right;
      return this.plot.dots ? (place - (rows - 1) / 2) * Math.min(5, (0.7 * span) / count / rows) : 0;
    }

    stroke(series, place) {
      const many = this.series.length;
      if (!this.plot.overlap || many < 2) return DASHES[styleOf(series)];
      const width = `stroke-width: ${(3.6 - (2.2 * place) / (many - 1)).toFixed(2)}`;
      return place ? { style: width, "stroke-dasharray": `5 ${3 + 2 * place}` } : { style: width };
    }

    marks() {
      let last = -99, level = 0;
      if (this.scaled !== "iteration") return;
      const shown = this.plot.marks.map((mark, place) => ({ ...mark, number: place + 1 }))
        .filter((mark) => mark.x >= this.range[0] && mark.x <= this.range[1]);
      for (const mark of shown) {
        const x = this.at(mark.x);
        level = x - last < 20 ? level + 1 : 0;
        last = x;
        add(this.svg, "line", { class: "mark", x1: x, x2: x, y1: PAD.top, y2: HEIGHT - PAD.bottom });
        const group = add(this.svg, "g", { class: "label" });
        add(group, "circle", { cx: x, cy: PAD.top + 8 + 19 * level, r: 8.5 });
        add(group, "text", { x, y: PAD.top + 12 + 19 * level, "text-anchor": "middle" }, String(mark.number));
        add(group, "title", {}, mark.text);
      }
    }

    select(from, to) {
      this.band?.remove();
      if (from === to) return;
      const [x, end] = [this.at(Math.min(from, to)), this.at(Math.max(from, to))];
      this.band = add(this.svg, "rect", {
        class: "band", x, y: PAD.top, width: end - x, height: HEIGHT - PAD.top - PAD.bottom,
      });
    }

    show(x) {
      this.hover.replaceChildren();
      this.cursor = x;
      this.tip.hidden = x === null;
      if (x === null) return;
      const parts = this.visible().map((part) => ({ ...part, k: nearest(part.series.x, x) }));
      if (!parts.length) { this.tip.hidden = true; return; }
      const closest = parts.map(({ series, k }) => series.x[k])
        .reduce((best, each) => (Math.abs(each - x) < Math.abs(best - x) ? each : best));
      this.cursor = closest;
      const cursor = this.at(closest);
      add(this.hover, "line", { class: "cursor", x1: cursor, x2: cursor, y1: PAD.top, y2: HEIGHT - PAD.bottom });
      this.tip.replaceChildren();
      const by = this.scaled === "iteration";
      const read = (value) => by ? value.toLocaleString("en") : this.written(value);
      html(this.tip, "strong", "", by ? `iteration ${read(closest)}` : `${read(closest)} ${this.scaled}`);
      for (const { series, k, place, from, to } of parts) {
        const away = series.x[k] === closest ? "" : ` (at ${read(series.x[k])})`;
        const value = `${written(series.y[k], 7)} ${this.series.length > 1 ? series.label : this.plot.unit}`;
        const line = series.log_lines[k] ? `, log line ${series.log_lines[k].toLocaleString("en")}` : "";
        html(this.tip, "span", this.named(series), value + away + line);
        const y = Math.max(PAD.top, this.high(series.y[k]));
        const x = this.at(series.x[k]) + this.aside(place, to - from + 1);
        add(this.hover, "circle", { class: `dot c${series.colour % 8}`, cx: x, cy: y, r: 4 });
      }
      const share = cursor / this.width;
      this.tip.style.left = share > 0.5 ? "auto" : `${100 * share + 2}%`;
      this.tip.style.right = share > 0.5 ? `${100 * (1 - share) + 2}%` : "auto";
    }
  }

  for (const figure of document.querySelectorAll("figure[data-plot]"))
    new Curves(figure, plots[figure.dataset.plot]);
})();
