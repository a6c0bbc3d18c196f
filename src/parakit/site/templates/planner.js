// Read the form, call the planner, and show its answer, which is the JSON of `parakit plan --json`.
import { call } from "./python.js";
const $ = (id) => document.getElementById(id);
const COLOURS = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999933", "#bbbbbb", "#ee8866", "#44aa99"];
const GIB = 2 ** 30;
const IN_LINK = "config=";

const element = (tag, text = "", attributes = {}) => {
  const node = Object.assign(document.createElement(tag), { textContent: text });
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};
const spell = (name) => name.replaceAll("_", " ");
const duration = (seconds) => seconds < 10 ? `${(1000 * seconds).toLocaleString("en", { maximumFractionDigits: 0 })} ms` : `${seconds.toFixed(1)} s`;

let devices = new Map();
let ownModel = "";
let planned = null; // The options and the answer of the newest plan, which the sliders begin with.
$("form").addEventListener("submit", (event) => { event.preventDefault(); plan(); });
$("share").addEventListener("click", async () => {
  writeLink();
  await navigator.clipboard.writeText(location.href);
  $("state").textContent = "The link is copied.";
});

function addModels(title, names) {
  const group = element("optgroup", "", { label: title });
  for (const name of names) group.append(element("option", name, { value: name }));
  $("model").append(group);
}

// The query of the page's address has the fields, and its fragment the pasted config.json.
function readLink() {
  for (const [name, value] of new URLSearchParams(location.search)) {
    const field = $("form").elements[name];
    if (!field) continue;
    field.value = value;
    // Another name of a device or a model, such as a100-80g, is in no list, but the planner knows it.
    if (field.value !== value) { field.append(element("option", value, { value })); field.value = value; }
    const fold = field.closest("details");
    if (fold && value) fold.open = true;
  }
  if (!location.search) { $("model").value = "llama3-8b"; $("gpu").value = "h100"; }
  if (location.hash.startsWith(`#${IN_LINK}`)) {
    $("config").value = decodeURIComponent(location.hash.slice(1 + IN_LINK.length));
    $("own").open = true;
  }
}

function fields() {
  const config = $("config").value.trim();
  return { config, options: [...new FormData($("form"))].filter(([name, value]) => value !== "" && !(config && name === "model")) };
}

function writeLink() {
  const { config, options } = fields();
  let text = config;
  try { text = config && JSON.stringify(JSON.parse(config)); } catch { /* The planner says what is wrong with it. */ }
  history.replaceState(null, "", `?${new URLSearchParams(options)}${config ? `#${IN_LINK}${encodeURIComponent(text)}` : ""}`);
}

const asArguments = (options) => options.flatMap(([name, value]) => [`--${name}`, value]);

async function plan() {
  const { config, options } = fields();
  writeLink();
  $("go").disabled = true;
  $("state").textContent = "Searching …";
  const began = performance.now();
  const answer = await call("plan", asArguments(options), config);
  const seconds = ((performance.now() - began) / 1000).toFixed(1);
  $("go").disabled = false;
  $("refusal").textContent = answer.code ? answer.err : "";
  const found = answer.code ? null : JSON.parse(answer.out);
  planned = found && { config, options, answer: found };
  show(found, seconds, config ? ` MODEL=${ownModel}` : "");
  if (found) offerSizes();
}

function show(plan, seconds, more) {
  for (const id of ["headline", "interval", "advice", "assumptions", "times", "parts", "command"]) $(id).replaceChildren();
  $("ranked").hidden = $("sizes").hidden = !plan;
  $("ranked").tBodies[0].replaceChildren();
  $("state").textContent = plan ? `${plan.legal_configurations.toLocaleString("en")} legal strategies, ${seconds} s. ${plan.calibration}.` : "";
  if (!plan) return;
  const room = devices.get(plan.gpu).memory_bytes;
  // The answers of the command's first screen, in its order: the strategy, its time with the range, its memory, …
  const [headline, time, memory, ...advice] = plan.advice;
  $("headline").append(element("b", headline));
  $("interval").textContent = `${time} ${memory}`;
  for (const sentence of advice) $("advice").append(element("li", sentence));
  $("command").append("Train it: ", element("code", plan.winner.command + more));
  const slowest = Math.max(...plan.ranked.map((layout) => layout.iteration_seconds));
  const times = legend("times", "Time", plan.ranked.map((layout) => layout.time));
  const parts = legend("parts", "Memory", plan.ranked.map((layout) => layout.memory));
  for (const layout of plan.ranked)
    $("ranked").tBodies[0].append(row(layout, room, slowest, times, parts, plan.tied.includes(layout.strategy)));
  for (const sentence of plan.assumptions) $("assumptions").append(element("li", sentence));
}

const colour = (rows) => {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row).filter((name) => row[name] > 0)))];
  return new Map(names.map((name, index) => [name, COLOURS[index % COLOURS.length]]));
};

function legend(id, title, rows) {
  const colours = colour(rows);
  $(id).append(element("b", title));
  for (const [name, shade] of colours) {
    const entry = element("span");
    entry.append(element("i", "", { style: `background:${shade}` }), spell(name));
    $(id).append(entry);
  }
  return colours;
}

function row(layout, room, slowest, times, parts, tied) {
  const made = element("tr");
  const name = element("td");
  name.append(element("code", layout.strategy), ` micro batch ${layout.micro_batch_size}`);
  if (layout.recompute !== "none") name.append(`, ${layout.recompute} recomputation`);
  if (tied) name.append(", tied with the first");
  const number = (text, more = "") => element("td", text, { class: `number ${more}`.trim() });
  const full = layout.memory_bytes > room;
  made.append(name, number((1000 * layout.iteration_seconds).toFixed(0)), number(Math.round(layout.tokens_per_second).toLocaleString("en"), "wide"),
    number(`${(100 * layout.mfu).toFixed(1)}%`, "wide"), cell(timeBar(layout, slowest, times)),
    number((layout.memory_bytes / GIB).toFixed(1), full ? "full" : ""), cell(memoryBar(layout, room, parts)));
  return made;
}

function cell(bar) {
  const made = element("td", "", { class: "wide" });
  made.append(bar);
  return made;
}

const timeBar = (layout, slowest, colours) => bar(layout.time, slowest, colours, (s) => `${(1000 * s).toFixed(1)} ms`);
const memoryBar = (layout, room, colours) => bar(layout.memory, room, colours, (b) => `${(b / GIB).toFixed(1)} GiB`);

function bar(shares, whole, colours, format) {
  const amounts = Object.entries(shares).filter(([, value]) => value > 0).map(([name, value]) => `${spell(name)} ${format(value)}`);
  const made = element("div", "", { class: "bar", role: "img", "aria-label": amounts.join(", "), title: amounts.join("\n") });
  for (const [name, shade] of colours)
    if (shares[name] > 0) made.append(element("span", "", { style: `background:${shade};width:${Math.min(100, (100 * shares[name]) / whole)}%` }));
  return made;
}

// The sliders: each has a list of values, and a move times one strategy, as `parakit plan --strategy` does.
const SIZES = [["batch", "global batch"], ["seq", "sequence length"], ["tensor", "TP"], ["pipeline", "PP"], ["context", "CP"], ["expert", "EP"]];
let values = {};
let isTiming = false;
let isWaiting = false;

const divisors = (number) => Array.from({ length: number }, (_, index) => index + 1).filter((size) => number % size === 0);
const around = (number) => [-3, -2, -1, 0, 1, 2, 3].map((power) => number * 2 ** power).filter((value) => value >= 1 && Number.isInteger(value));

function offerSizes() {
  const { answer } = planned;
  const split = answer.winner.parallelism;
  const sizes = divisors(answer.gpus);
  values = { batch: around(answer.global_batch), seq: around(answer.seq_length), tensor: sizes.filter((size) => size <= 64), pipeline: sizes, context: sizes, expert: sizes };
  const start = { batch: answer.global_batch, seq: answer.seq_length, ...split };
  $("sliders").replaceChildren();
  for (const [name, title] of SIZES) {
    const label = element("label");
    const heading = element("span", title);
    const shown = element("output", start[name].toLocaleString("en"));
    heading.append(shown);
    const position = Math.max(0, values[name].indexOf(start[name]));
    const slider = element("input", "", { type: "range", min: 0, max: values[name].length - 1, step: 1, value: position, id: `size-${name}` });
    slider.addEventListener("input", () => { shown.textContent = values[name][slider.value].toLocaleString("en"); time(); });
    label.append(heading, slider);
    $("sliders").append(label);
  }
  $("sharding").value = split.sharding;
  showTimed(answer.winner);
}

$("sharding").addEventListener("change", () => time());
const chosen = (name) => values[name][$(`size-${name}`).value];

// Time the chosen sizes. While one call runs, further moves wait, and only the newest of them is timed.
async function time() {
  if (isTiming) { isWaiting = true; return; }
  isTiming = true;
  do {
    isWaiting = false;
    const { config, options, answer } = planned;
    const { parallelism: split, micro_batch_size: micro } = answer.winner;
    const sizes = { devices: answer.gpus, sharding: $("sharding").value };
    for (const name of ["tensor", "pipeline", "context", "expert"]) sizes[name] = chosen(name);
    sizes.virtual = sizes.pipeline === split.pipeline ? split.virtual_stages : 1;
    const perReplica = chosen("batch") / Math.max(1, answer.gpus / (sizes.tensor * sizes.pipeline * sizes.context));
    let samples = micro;
    while (samples > 1 && perReplica % samples) samples -= 1;
    const changed = ["global-batch", "seq", "micro-batch"];
    const rest = options.filter(([name]) => !changed.includes(name));
    rest.push(["global-batch", String(chosen("batch"))], ["seq", String(chosen("seq"))], ["micro-batch", String(samples)]);
    const timed = await call("resize", asArguments(rest), JSON.stringify(sizes), config);
    $("sized-refusal").textContent = timed.code ? timed.err : "";
    showTimed(timed.out ? JSON.parse(timed.out).layout : null);
  } while (isWaiting);
  isTiming = false;
}

function showTimed(layout) {
  for (const id of ["sized-strategy", "sized-time", "sized-memory", "sized-time-bar", "sized-memory-bar"]) $(id).replaceChildren();
  if (!layout) return;
  const room = devices.get(planned.answer.gpu).memory_bytes;
  const { ranked } = planned.answer;
  const best = planned.answer.winner.iteration_seconds;
  $("sized-strategy").textContent = layout.strategy;
  $("sized-time").textContent = ` ${duration(layout.iteration_seconds)}, ${(layout.iteration_seconds / best).toFixed(2)} times the first strategy's time; ${Math.round(layout.tokens_per_second).toLocaleString("en")} tokens/s, micro batch ${layout.micro_batch_size}`;
  $("sized-memory").textContent = `${(layout.memory_bytes / GIB).toFixed(1)} of ${(room / GIB).toFixed(0)} GiB on the peak rank${layout.memory_bytes > room ? ": it does not fit" : ""}`;
  $("sized-memory").classList.toggle("full", layout.memory_bytes > room);
  $("sized-time-bar").append(timeBar(layout, 2 * best, colour([...ranked.map((other) => other.time), layout.time])));
  $("sized-memory-bar").append(memoryBar(layout, room, colour([...ranked.map((other) => other.memory), layout.memory])));
}

// Begin only when every constant above is set.
try {
  const known = await call("choices");
  ownModel = known.own_model;
  devices = new Map(known.devices.map((device) => [device.key, device]));
  addModels("well known", known.well_known);
  addModels("all of the kit", known.models.filter((name) => !known.well_known.includes(name)));
  for (const device of known.devices) $("gpu").append(element("option", device.name, { value: device.key }));
  for (const link of known.links)
    for (const list of ["intra", "inter"])
      $(list).append(element("option", `${link.name}, ${(link.bytes_per_second / 1e9).toLocaleString("en")} GB/s per device`, { value: link.key }));
  readLink();
  $("go").disabled = $("share").disabled = false;
  $("state").textContent = "Ready.";
  await plan();
} catch (error) {
  $("state").textContent = "";
  $("refusal").textContent = `Python could not be loaded: ${error.message}`;
}
