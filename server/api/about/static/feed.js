// The server's feed: one event a second, read with fetch so that it can carry a key. Comes back by itself.

import { ask } from "./api.js";

const SILENCE = 6000;
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** Calls `take(frame)` for every event, and `lost()` when there are none: not where one stream follows another at once.
 * Never returns. */
export async function follow(since, take, lost) {
  for (let wait = 500; ; wait = Math.min(2 * wait, 8000)) {
    const quiet = new AbortController();
    let timer = null,
      heard = false;
    const silent = () => {
      quiet.abort();
      lost();
    };
    const listen = () => {
      clearTimeout(timer);
      timer = setTimeout(silent, SILENCE);
    };
    try {
      listen();
      const response = await ask(`dashboard/feed?since=${since()}`, { signal: quiet.signal });
      for await (const frame of events(response.body)) {
        listen();
        wait = 500;
        heard = true;
        take(frame);
      }
    } catch (error) {
      console.debug("feed:", error);
    }
    clearTimeout(timer);
    if (!heard) lost();
    await pause(wait);
  }
}

/** The data of each event of a stream, parsed. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: ")) yield JSON.parse(block.slice(6));
  }
}
