// A picture of a race, drawn as the page shows it, to copy or to save.

import { html } from "./elements.js";
import { count, time } from "./format.js";

const [WIDTH, HEIGHT, EDGE, GAP, SHARP] = [1200, 675, 48, 40, 2];
const [LANE, LINE, LAST_LINE] = [(WIDTH - 2 * EDGE - GAP) / 2, 32, HEIGHT - 92];
const SANS = 'system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif';

/** Buttons for the picture of this race; about(): a line on what ran. */
export function pictureButtons(race, about) {
  const made = () => new Promise((resolve) => drawn(race, about()).toBlob(resolve, "image/png"));
  const button = (label, done, onclick) => {
    const element = html("button.quiet", { type: "button" }, label);
    element.addEventListener("click", async () => {
      element.textContent = await onclick().then(
        () => done,
        () => "Not allowed here",
      );
      setTimeout(() => (element.textContent = label), 1800);
    });
    return element;
  };
  const copy = async () => navigator.clipboard.write([new ClipboardItem({ "image/png": made() })]);
  const canCopy = globalThis.ClipboardItem && navigator.clipboard; // where the page is served securely
  return [
    canCopy && button("Copy picture", "Copied", copy),
    button("Save picture", "Saved", async () => save(await made())),
  ];
}

function save(blob) {
  const link = html("a", { href: URL.createObjectURL(blob), download: "foresay-race.png" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** The race on a canvas of its own. */
function drawn(race, about) {
  const canvas = html("canvas", { width: SHARP * WIDTH, height: SHARP * HEIGHT }),
    pen = canvas.getContext("2d"),
    page = getComputedStyle(document.body),
    colour = (name) => page.getPropertyValue(`--${name}`),
    write = (text, x, y, font, name, room) => {
      [pen.font, pen.fillStyle] = [`${font} ${SANS}`, colour(name)];
      pen.fillText(cut(pen, text, room), x, y);
    };
  pen.scale(SHARP, SHARP);
  [pen.fillStyle, pen.textBaseline] = [colour("card"), "alphabetic"];
  pen.fillRect(0, 0, WIDTH, HEIGHT);
  const wide = WIDTH - 2 * EDGE;
  write(race.headline, EDGE, 74, "700 36px", race.kind === "good" ? "good" : race.kind || "ink", wide);
  write(race.detail, EDGE, 106, "400 17px", "soft", wide);
  write(`“${race.prompt}”`, EDGE, 142, "400 17px", "ink", wide);
  write(about, EDGE, HEIGHT - 34, "400 15px", "soft", wide);
  const slowest = Math.max(...race.seconds);
  race.lanes.forEach((lane, index) => {
    const left = EDGE + index * (LANE + GAP),
      seconds = race.seconds[index];
    write(lane.title, left, 196, "600 17px", "ink", LANE);
    write(time(seconds), left, 240, "700 40px", lane.element.matches(".first") ? "accent" : "ink", LANE);
    const counts = `${count(lane.tokens)} tokens, ${count(lane.steps.size)} passes`;
    pen.textAlign = "right";
    write(counts, left + LANE, 240, "400 17px", "soft", LANE);
    pen.textAlign = "left";
    pen.fillStyle = colour("grid");
    pen.fillRect(left, 256, LANE, 8);
    pen.fillStyle = colour(lane.element.matches(".first") ? "accent" : "before");
    pen.fillRect(left, 256, (LANE * seconds) / slowest, 8);
    tokens(pen, [...lane.text.place.children], left);
  });
  return canvas;
}

/** The beginning of a coloured text, in lines that fit a lane. */
function tokens(pen, spans, left) {
  let [x, y] = [left, 304];
  for (const span of spans)
    for (const part of span.textContent.split(/(\n|[^\S\n]+)/).filter(Boolean)) {
      const { color, backgroundColor, fontFamily } = getComputedStyle(span);
      pen.font = `${span.matches(".fenced") ? 16 : 18}px ${fontFamily}`;
      const width = pen.measureText(part).width,
        full = x + width > left + LANE;
      if (part === "\n" || full) [x, y] = [left, y + LINE];
      if (y > LAST_LINE) return;
      if (part === "\n" || (full && !part.trim())) continue;
      pen.fillStyle = backgroundColor;
      pen.fillRect(x, y - 19, width, 26);
      pen.fillStyle = color;
      pen.fillText(part, x, y);
      x += width;
    }
}

/** As much of a text as there is room for. */
function cut(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let length = text.length;
  while (pen.measureText(`${text.slice(0, length)}…`).width > room) length -= 1;
  return `${text.slice(0, length)}…`;
}
