// Read the form, call the planner, and show its answer, which is the JSON of `python -m parakit plan --json`.
import { call } from "./python.js";
const $ = (id) => document.getElementById(id);
const COLOURS = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999933", "#bbbbbb", "#ee8866", "#44aa99"];
const GIB = 2 ** 30;

const element = (tag, text = "", attributes = {}) => {
  const node = Object.assign(document.createElement(tag), { textContent: text });
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};
const spell = (name) => name.replaceAll("_", " ");

let devices = new Map();
let ownModel = "";
try {
  const known = await call("choices");
  ownModel = known.own_model;
  devices = new Map(known.devices.map((device) => [device.key, device]));
  for (const model of known.models) $("model").append(element("option", model.name, { value: model.name }));
  for (const device of known.devices) $("gpu").append(element("option", device.name, { value: device.key }));
  for (const link of known.links)
    for (const list of ["intra", "inter"])
      $(list).append(element("option", `${link.name}, ${(link.bytes_per_second / 1e9).toLocaleString("en")} GB/s per device`, { value: link.key }));
  for (const [name, value] of new URLSearchParams(location.search)) {
    const field = $("form").elements[name];
    if (field) field.value = value;
  }
  if (!location.search) { $("model").value = "llama3-8b"; $("gpu").value = "h100"; }
  $("go").disabled = false;
  $("state").textContent = "Ready.";
  await plan();
} catch (error) {
  $("state").textContent = "";
  $("refusal").textContent = `Python could not be loaded: ${error.message}`;
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); plan(); });

async function plan() {
  const config = $("config").value.trim();
  const options = [...new FormData($("form"))].filter(([name, value]) => value !== "" && !(config && name === "model"));
  history.replaceState(null, "", `?${new URLSearchParams(options)}`);
  $("go").disabled = true;
  $("state").textContent = "Searching …";
  const began = performance.now();
  const answer = await call("plan", options.flatMap(([name, value]) => [`--${name}`, value]), config);
  const seconds = ((performance.now() - began) / 1000).toFixed(1);
  $("go").disabled = false;
  $("refusal").textContent = answer.code ? answer.err : "";
  show(answer.code ? null : JSON.parse(answer.out), seconds, config ? ` MODEL=${ownModel}` : "");
}

function show(plan, seconds, more) {
  for (const id of ["advice", "assumptions", "times", "parts", "command"]) $(id).replaceChildren();
  $("ranked").hidden = !plan;
  $("ranked").tBodies[0].replaceChildren();
  $("state").textContent = plan ? `${plan.legal_configurations} legal strategies, ${seconds} s. ${plan.calibration}.` : "";
  if (!plan) return;
  const room = devices.get(plan.gpu).memory_bytes;
  for (const sentence of plan.advice) $("advice").append(element("li", sentence));
  $("command").append("Train it: ", element("code", plan.winner.command + more));
  const slowest = Math.max(...plan.ranked.map((layout) => layout.iteration_seconds));
  const times = legend("times", "Time", plan.ranked.map((layout) => layout.time));
  const parts = legend("parts", "Memory", plan.ranked.map((layout) => layout.memory));
  for (const layout of plan.ranked)
    $("ranked").tBodies[0].append(row(layout, room, slowest, times, parts, plan.tied.includes(layout.strategy)));
  for (const sentence of plan.assumptions) $("assumptions").append(element("li", sentence));
}

function legend(id, title, rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row).filter((name) => row[name] > 0)))];
  const colours = new Map(names.map((name, index) => [name, COLOURS[index % COLOURS.length]]));
  $(id).append(element("b", title));
  for (const [name, colour] of colours) {
    const entry = element("span");
    entry.append(element("i", "", { style: `background:${colour}` }), spell(name));
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
  made.append(name, number((1000 * layout.iteration_seconds).toFixed(0)), number(Math.round(layout.tokens_per_second).toLocaleString("en")),
    number(`${(100 * layout.mfu).toFixed(1)}%`), bar(layout.time, slowest, times, (s) => `${(1000 * s).toFixed(1)} ms`),
    number((layout.memory_bytes / GIB).toFixed(1), full ? "full" : ""), bar(layout.memory, room, parts, (b) => `${(b / GIB).toFixed(1)} GiB`));
  return made;
}

function bar(shares, whole, colours, format) {
  const cell = element("td");
  const amounts = Object.entries(shares).filter(([, value]) => value > 0).map(([name, value]) => `${spell(name)} ${format(value)}`);
  const made = element("div", "", { class: "bar", role: "img", "aria-label": amounts.join(", "), title: amounts.join("\n") });
  for (const [name, colour] of colours)
    if (shares[name] > 0) made.append(element("span", "", { style: `background:${colour};width:${Math.min(100, (100 * shares[name]) / whole)}%` }));
  cell.append(made);
  return cell;
}
