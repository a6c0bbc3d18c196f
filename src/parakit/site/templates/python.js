// Call a function of src/parakit/site/in_browser.py, which runs in a thread of its own.
const waiting = new Map();
let worker = null;
let calls = 0;

function start() {
  worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  worker.onmessage = ({ data }) => {
    const [resolve, reject] = waiting.get(data.id);
    waiting.delete(data.id);
    data.error ? reject(new Error(data.error)) : resolve(data.answer);
  };
}

export const call = (name, ...parameters) => new Promise((resolve, reject) => {
  if (!worker) start();
  waiting.set(++calls, [resolve, reject]);
  worker.postMessage({ id: calls, call: name, parameters });
});
