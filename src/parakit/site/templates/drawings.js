// Draw the strategy of the form: pass the form's values to `draw`, and show the figure that it returns.
import { call } from "./python.js";
const $ = (id) => document.getElementById(id);
const FIELDS = ["model", "strategy", "device", "devices", "micro_batch", "global_batch"];
const { elements } = $("form");

for (const [name, value] of new URLSearchParams(location.search)) if (elements[name]) elements[name].value = value;
if (location.search) draw();
$("form").addEventListener("submit", (event) => { event.preventDefault(); draw(); });

async function draw() {
  const values = FIELDS.map((name) => elements[name].value);
  const query = FIELDS.map((name, index) => [name, values[index]]).filter(([, value]) => value);
  $("go").disabled = true;
  $("refusal").textContent = "";
  $("state").textContent = "Loading Python and drawing …";
  try {
    history.replaceState(null, "", `?${new URLSearchParams(query)}#own`);
    const answer = await call("draw", ...values);
    $("refusal").textContent = answer.code ? answer.err : "";
    $("drawn").innerHTML = answer.out;
    $("state").textContent = "";
  } catch (error) {
    $("state").textContent = "";
    $("refusal").textContent = `Python could not be loaded: ${error.message}.`;
  }
  $("go").disabled = false;
}
