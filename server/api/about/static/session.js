// Responses over the server's WebSocket, one after the other. docs/protocol.md describes the events.

import { ask, openSocket } from "./api.js";
import { model } from "./models.js";

const LAST = ["response.completed", "response.incomplete", "response.failed"];

export class Session {
  constructor() {
    this.socket = null;
    this.running = null;
    this.stopped = false;
  }

  /** Make a response; `more({ tokens, steps, text, thought })` is called for each of its deltas. Resolves to the
   * finished response.
   *
   * Throws an Error that says what the server did not like.
   */
  async run(fields, more) {
    this.stopped = false;
    await this._open();
    return new Promise((resolve, reject) => {
      this.running = { resolve, reject, more };
      this.socket.send(JSON.stringify({ type: "response.create", model: model(), provenance: true, ...fields }));
      if (this.stopped) this.cancel(); // requested while the socket was being opened
    });
  }

  /** End what runs; its text stays. */
  cancel() {
    this.stopped = true;
    if (this.running) this.socket.send(JSON.stringify({ type: "response.cancel" }));
  }

  async _open() {
    if (this.socket?.readyState === WebSocket.OPEN) return;
    await ask("v1/models"); // a handshake that is refused says nothing to a page: what is wrong is shown here
    const socket = (this.socket = openSocket());
    socket.onmessage = ({ data }) => this._take(JSON.parse(data));
    await new Promise((resolve, reject) => {
      socket.onopen = resolve;
      socket.onclose = () => {
        reject(new Error("the connection could not be opened"));
        this._end("reject", new Error("the connection was lost"));
      };
    });
  }

  _take(event) {
    if (event.type === "error") return this._end("reject", new Error(event.error.message));
    if (event.type === "response.failed") return this._end("reject", new Error(event.response.error.message));
    if (LAST.includes(event.type)) return this._end("resolve", event.response);
    if (!event.type.endsWith(".delta")) return;
    const { tokens = [], steps = [] } = event.provenance ?? {};
    const thinks = event.type.startsWith("response.reasoning");
    this.running?.more({ tokens, steps, [thinks ? "thought" : "text"]: event.delta });
  }

  _end(how, what) {
    const running = this.running;
    this.running = null;
    running?.[how](what);
  }
}
