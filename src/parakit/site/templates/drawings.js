// A strategy of one's own: the form's answers go to `draw`, its figure to the page.
import { call } from "./python.js";
const $ = (id) => document.getElementById(id);
const FIELDS = ["model", "strategy", "device", "devices", "micro_batch", "global_batch"];
const { elements } = $("form");

for (const [name, value] of new URLSearchParams(location.search)) if (elements[name]) elements[name].value = value;
if (location.search) draw();
$("form").addEventListener("submit", (event) => { event.preventDefault(); draw(); });

async function draw() {
  const given = FIELDS.map((name) => elements[name].value);
  const said = FIELDS.map((name, place) => [name, given[place]]).filter(([, value]) => value);
  $("go").disabled = true;
  $("refusal").textContent = "";
  $("state").textContent = "Python is loaded, and draws …";
  try {
    history.replaceState(null, "", `?${new URLSearchParams(said)}#own`);
    const answer = await call("draw", ...given);
    $("refusal").textContent = answer.code ? answer.err : "";
    $("drawn").innerHTML = answer.out;
    $("state").textContent = "";
  } catch (error) {
    $("state").textContent = "";
    $("refusal").textContent = `Python could not be loaded: ${error.message}.`;
  }
  $("go").disabled = false;
}
