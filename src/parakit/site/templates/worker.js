// Run Python in a thread of its own, so that the page responds while the planner searches.
import { loadPyodide } from "./pyodide.mjs";

const ready = (async () => {
  const pyodide = await loadPyodide({ indexURL: new URL("./", import.meta.url).href });
  const extractDir = pyodide.runPython("import site; site.getsitepackages()[0]");
  for (const [name, format] of [["parakit.zip", "wheel"], ["msgspec.zip", "wheel"], ["pure.zip", "zip"]]) {
    const answer = await fetch(new URL(name, import.meta.url));
    if (!answer.ok) throw new Error(`${name} could not be loaded (${answer.status})`);
    pyodide.unpackArchive(await answer.arrayBuffer(), format, { extractDir });
  }
  pyodide.runPython("import importlib; importlib.invalidate_caches()");
  return pyodide.pyimport("parakit.site.in_browser");
})();

onmessage = async ({ data }) => {
  try {
    const kit = await ready;
    postMessage({ id: data.id, answer: JSON.parse(kit[data.call](...data.parameters)) });
  } catch (error) {
    postMessage({ id: data.id, error: String(error) });
  }
};
