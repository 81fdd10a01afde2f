// Follows the router's snapshots, and shows them.

import { show, showAccuracy } from "./sections.js";
import { $, ask, classed, write } from "./table.js";

const RETRY_MS = [500, 1000, 2000, 5000];
const SILENT_MS = 5000;

let last = null;
let heardAt = 0;
let paused = false;

function say(words, lost = false) {
  write($("state"), words);
  classed($("state"), lost ? "state lost" : "state");
}

/** Follows the events until they end; uses fetch, because EventSource sends no token. */
async function follow(signal) {
  const response = await ask("dashboard/events", { signal });
  if (response.status === 401) return askForToken();
  if (!response.ok) throw new Error(`status ${response.status}`);
  $("token-form").hidden = true;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the router ended");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    if (!events.length) continue;
    heardAt = performance.now();
    try {
      last = JSON.parse(events.at(-1).slice("data: ".length));
      $("main").hidden = false;
      if (!paused) show(last);
      say(paused ? "paused" : "live");
    } catch (error) {
      console.error(error);
      say("the page cannot show what the router sent", true);
    }
  }
}

function askForToken() {
  const wrong = sessionStorage.getItem("token") !== null;
  sessionStorage.removeItem("token");
  $("main").hidden = true;
  $("token-form").hidden = false;
  write($("token-error"), wrong ? "That is not the token." : "");
  say("waiting for a token");
  $("token").focus();
  return new Promise((resolve) => {
    $("token-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem("token", $("token").value);
      $("token").value = "";
      resolve();
    };
  });
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

/** Follows the router without end; pauses while the tab is hidden, and reconnects when no event arrives. */
async function live() {
  for (let failures = 0; ; ) {
    await visible();
    const stop = new AbortController();
    const began = performance.now();
    const watch = setInterval(() => {
      if (document.hidden || performance.now() - Math.max(began, heardAt) > SILENT_MS) stop.abort();
    }, 1000);
    try {
      await follow(stop.signal);
      failures = 0;
    } catch {
      if (!document.hidden) {
        say(last ? "no connection to the router: these figures are old" : "no connection to the router", true);
        failures = heardAt > began ? 0 : failures + 1;
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
      }
    } finally {
      stop.abort(); // otherwise the abandoned response would go on
      clearInterval(watch);
    }
  }
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  if (!paused && last) show(last);
});
const redraw = () => last && showAccuracy(last.pools);
window.addEventListener("resize", redraw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
live();
