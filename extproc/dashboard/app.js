// The page: follows the router's news and shows them. What comes from the router is only ever
// written as text.

const $ = (id) => document.getElementById(id);
const RETRY_MS = [500, 1000, 2000, 5000];
const STALE_MS = 4000;

// -- numbers in words ------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const known = (value, text) => (value === null || value === undefined ? "–" : text(value));
const count = (value) => known(value, (one) => whole.format(one));
const tokens = (value) => known(value, (one) => short.format(one));
const percent = (value) => known(value, (one) => `${Math.round(one * 100)}%`);
const seconds = (value) =>
  known(value, (one) => (one >= 100 ? `${whole.format(one)} s` : one >= 10 ? `${one.toFixed(1)} s` : `${one.toFixed(2)} s`));

// -- elements --------------------------------------------------------------------------------

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function write(node, text) {
  if (node.textContent !== text) node.textContent = text; // what stays is not read aloud again
}

function classed(node, name) {
  if (node.className !== name) node.className = name;
}

/** A table that keeps its rows from one news to the next. Roles: on a phone rows are cards. */
class Table {
  constructor(columns, className = "cards") {
    this.columns = columns;
    this.rows = new Map();
    this.body = element("tbody");
    this.body.setAttribute("role", "rowgroup");
    this.caption = element("caption");
    const heads = columns.map((one) => {
      const head = element("th", { scope: "col", className: one.className ?? "", textContent: one.name });
      if (!one.name) head.append(element("span", { className: "skip", textContent: "chosen" }));
      head.setAttribute("role", "columnheader");
      return head;
    });
    const row = element("tr", {}, ...heads);
    row.setAttribute("role", "row");
    const head = element("thead", {}, row);
    head.setAttribute("role", "rowgroup");
    this.table = element("table", {}, this.caption, head, this.body);
    this.table.setAttribute("role", "table");
    this.node = element("div", { className: `scroll ${className}`, tabIndex: 0 }, this.table);
    this.node.setAttribute("role", "region");
  }

  named(name, shown) {
    this.node.setAttribute("aria-label", name);
    write(this.caption, shown ? name : "");
    this.caption.hidden = !shown;
    return this;
  }

  /** `key` names what a row is about: its row stays, and the rows stand in the given order. */
  show(items, key, decorate = () => {}) {
    const keys = new Set(items.map(key));
    for (const [name, row] of this.rows) {
      if (!keys.has(name)) {
        row.remove();
        this.rows.delete(name);
      }
    }
    items.forEach((item, place) => {
      let row = this.rows.get(key(item));
      if (!row) {
        row = this.newRow();
        this.rows.set(key(item), row);
      }
      if (this.body.children[place] !== row) this.body.insertBefore(row, this.body.children[place] ?? null);
      this.columns.forEach((column, at) => column.fill(row.children[at], item));
      decorate(row, item);
    });
  }

  newRow() {
    const cells = this.columns.map((one) => {
      const cell = element(one.head ? "th" : "td", { className: one.className ?? "" });
      if (one.head) cell.scope = "row";
      cell.setAttribute("role", one.head ? "rowheader" : "cell");
      cell.dataset.label = one.name;
      return cell;
    });
    const row = element("tr", {}, ...cells);
    row.setAttribute("role", "row");
    return row;
  }
}

const text = (name, value, more = {}) => ({ name, fill: (cell, item) => write(cell, value(item)), ...more });

/** Words that are cut where they are long. */
const brief = (name, value) => ({
  name,
  className: "words",
  fill: (cell, item) => {
    if (!cell.firstChild) cell.append(element("span", { className: "brief" }));
    write(cell.firstChild, value(item));
  },
});

/** A figure with a bar under it that says the same. */
const meter = (name, value, share) => ({
  name,
  fill: (cell, item) => {
    if (!cell.firstChild) {
      const bar = element("span", { className: "meter" }, element("i"));
      bar.setAttribute("aria-hidden", "true");
      cell.append(element("span"), bar);
    }
    write(cell.firstChild, value(item));
    const width = `${Math.round(Math.min(Math.max(share(item) ?? 0, 0), 1) * 100)}%`;
    const bar = cell.lastChild.firstChild;
    if (bar.style.width !== width) bar.style.width = width;
  },
});

/** Two lines: the second in small print. */
const twoLines = (name, first, second, more = {}) => ({
  name,
  fill: (cell, item) => {
    if (!cell.firstChild) cell.append(element("span"), element("small"));
    write(cell.firstChild, first(item));
    write(cell.lastChild, second(item));
    cell.lastChild.hidden = !second(item);
    more.decorate?.(cell, item);
  },
  ...more,
});

// -- replicas --------------------------------------------------------------------------------

const HEALTH = { ok: "ok", draining: "draining", out: "left out", down: "down" };

function health({ why_not: why, healthy }) {
  if (!why) return "ok";
  if (why === "draining") return why;
  return healthy ? "out" : "down";
}

const REPLICA_COLUMNS = [
  twoLines("Replica", (one) => one.name, (one) => (one.name === one.replica ? one.models : `${one.replica} ${one.models}`), {
    head: true,
    className: "left",
  }),
  twoLines("Health", (one) => HEALTH[health(one)], (one) => (one.why_not === "draining" ? "" : one.why_not), {
    className: "left",
    decorate: (cell, one) => classed(cell, `left health ${health(one)}`),
  }),
  meter("Running", (one) => count(one.running), (one) => one.running / Math.max(one.most, 1)),
  meter("Waiting", (one) => count(one.waiting), (one) => one.waiting / Math.max(one.most, 1)),
  meter("KV", (one) => percent(one.kv_usage), (one) => one.kv_usage),
  text("Warm tokens", (one) => `${one.warm_known ? "" : "≈ "}${tokens(one.warm_tokens)}`),
  text("Backlog", (one) => seconds(one.backlog_s)),
  twoLines("Speed", (one) => `${tokens(one.prefill_per_s)} in/s`, (one) => `${tokens(one.decode_per_s)} out/s`, {
    decorate: (cell, one) => classed(cell, one.measured ? "" : "profile"),
  }),
  text("×", (one) => known(one.stretch, (value) => value.toFixed(2))),
  meter("Share", (one) => percent(one.share), (one) => one.share),
  text("News", (one) => known(one.news_age_s, (age) => `${age.toFixed(1)} s ago`)),
];

const replicaTables = new Map();

function tableOf(tables, place, name, columns) {
  if (!tables.has(name)) {
    tables.set(name, new Table(columns));
    place.append(tables.get(name).node);
  }
  return tables.get(name);
}

/** Columns of the news, to an object a replica. */
function replicasOf(pool, decided) {
  const names = Object.keys(pool.replicas);
  const rows = pool.replicas.replica.map((_, at) =>
    Object.fromEntries(names.map((name) => [name, pool.replicas[name][at]])),
  );
  const most = Math.max(...rows.map((one) => one.running + one.waiting), 1);
  for (const one of rows) Object.assign(one, { most, share: decided ? one.sent / decided : 0 });
  return rows.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
}

function showReplicas(pools, decided) {
  for (const pool of pools) {
    const table = tableOf(replicaTables, $("replicas"), pool.name, REPLICA_COLUMNS);
    table.named(`Replicas of pool ${pool.name}`, pools.length > 1);
    table.show(replicasOf(pool, decided), (one) => one.replica);
  }
}

// -- warnings and figures --------------------------------------------------------------------

function showWarnings(all) {
  const list = $("warnings");
  const there = new Map([...list.children].map((one) => [one.textContent, one]));
  for (const [warning, item] of there) if (!all.includes(warning)) item.remove();
  for (const warning of new Set(all)) if (!there.has(warning)) list.append(element("li", { textContent: warning }));
  $("no-warnings").hidden = all.length > 0;
}

function showFacts(list, facts) {
  facts.forEach(([name, value], at) => {
    const pair = list.children[at] ?? list.appendChild(element("div", {}, element("dt"), element("dd")));
    write(pair.firstChild, name);
    write(pair.lastChild, value);
  });
  while (list.children.length > facts.length) list.lastChild.remove();
}

function showFigures(news, decided) {
  const replicas = news.pools.flatMap((pool) => pool.replicas.why_not);
  const usable = replicas.filter((why) => !why).length;
  const held = news.pools.flatMap((pool) => pool.held).reduce((sum, one) => sum + one.requests, 0);
  showFacts($("figures"), [
    ["replicas in use", `${usable} of ${replicas.length}`],
    ["requests in flight, of this router", count(news.pools.reduce((sum, pool) => sum + pool.in_flight, 0))],
    ["waiting at this router", count(held)],
    ["decisions a second, of late", (decided / news.decisions_s).toFixed(1)],
  ]);
}

// -- predicted against actual ----------------------------------------------------------------

const figures = new Map();

function figureOf(name) {
  if (!figures.has(name)) {
    const canvas = element("canvas");
    canvas.setAttribute("role", "img");
    const figure = element("figure", {}, element("h3"), canvas, element("figcaption", { className: "note" }));
    $("accuracy").append(figure);
    figures.set(name, figure);
  }
  return figures.get(name);
}

function showAccuracy(pools) {
  for (const pool of pools) {
    const [heading, canvas, caption] = figureOf(pool.name).children;
    write(heading, `Pool ${pool.name}`);
    heading.hidden = pools.length < 2;
    const { p10, p50, p90 } = pool.actual_to_predicted;
    const summary = pool.ended
      ? `Of ${count(pool.ended)} requests that ended in the last 5 minutes, half took at most ${p50.toFixed(2)} ` +
        `times as long as predicted, and eight of ten between ${p10.toFixed(2)} and ${p90.toFixed(2)} times: the band.`
      : "No request ended in the last 5 minutes whose end was seen.";
    write(caption, summary);
    canvas.setAttribute("aria-label", summary);
    canvas.hidden = !pool.ended;
    if (pool.ended) draw(canvas, pool.points, [p10, p50, p90]);
  }
}

function draw(canvas, points, [low, middle, high]) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name);
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const ticks = scale(points.flatMap(([predicted, actual]) => [predicted, actual]).filter((one) => one > 0));
  const [least, most] = [ticks[0], ticks.at(-1)];
  const [left, right, top, bottom] = [52, 18, 10, 40];
  const part = (value) => Math.log(value / least) / Math.log(most / least);
  const x = (value) => left + part(value) * (width - left - right);
  const y = (value) => height - bottom - part(value) * (height - top - bottom);

  pen.lineWidth = 1;
  pen.strokeStyle = colour("--line");
  pen.fillStyle = colour("--quiet");
  for (const value of ticks) {
    pen.beginPath();
    pen.moveTo(x(value), y(least));
    pen.lineTo(x(value), y(most));
    pen.moveTo(x(least), y(value));
    pen.lineTo(x(most), y(value));
    pen.stroke();
    pen.textAlign = "center";
    pen.fillText(`${value} s`, x(value), height - bottom + 16);
    pen.textAlign = "right";
    pen.fillText(`${value} s`, left - 6, Math.max(y(value), 10) + 4);
  }
  pen.textAlign = "center";
  pen.fillText("predicted →", (left + width - right) / 2, height - 8);
  pen.save();
  pen.translate(10, (height - bottom) / 2);
  pen.rotate(-Math.PI / 2);
  pen.fillText("actual →", 0, 0);
  pen.restore();

  pen.save();
  pen.beginPath();
  pen.rect(left, top, width - left - right, height - top - bottom);
  pen.clip();
  pen.fillStyle = colour("--band");
  pen.beginPath();
  pen.moveTo(x(least), y(least * low));
  pen.lineTo(x(most), y(most * low));
  pen.lineTo(x(most), y(most * high));
  pen.lineTo(x(least), y(least * high));
  pen.fill();
  line(pen, [x(least), y(least * middle)], [x(most), y(most * middle)], colour("--accent"), []);
  line(pen, [x(least), y(least)], [x(most), y(most)], colour("--quiet"), [5, 4]);
  pen.fillStyle = colour("--accent");
  pen.globalAlpha = 0.65;
  for (const [predicted, actual] of points) {
    if (!(predicted > 0 && actual > 0)) continue;
    pen.beginPath();
    pen.arc(x(predicted), y(actual), 2.5, 0, 2 * Math.PI);
    pen.fill();
  }
  pen.restore();
}

/** 1, 2, 5, 10 …: from what is just below all values to what is just above. */
function scale(values) {
  const steps = [];
  for (let power = -3; power < 5; power++) for (const digit of [1, 2, 5]) steps.push(Number(`${digit}e${power}`));
  const first = steps.findLastIndex((one) => one <= Math.min(...values));
  const last = steps.findIndex((one) => one >= Math.max(...values));
  return steps.slice(Math.max(first, 0), Math.max(last, first + 2, 2) + 1);
}

function line(pen, from, to, colour, dashes) {
  pen.strokeStyle = colour;
  pen.setLineDash(dashes);
  pen.beginPath();
  pen.moveTo(...from);
  pen.lineTo(...to);
  pen.stroke();
  pen.setLineDash([]);
}

// -- what waits, routers, pollers ------------------------------------------------------------

const HELD_COLUMNS = [
  text("Tenant", (one) => one.tenant || "–", { head: true, className: "left" }),
  text("Priority", (one) => count(one.priority)),
  text("Model", (one) => one.model, { className: "left" }),
  text("Requests", (one) => count(one.requests)),
  text("Longest", (one) => seconds(one.longest_s)),
  text("For replica", (one) => Object.entries(one.replicas).map(([name, many]) => `${name} (${many})`).join(", "), {
    className: "words",
  }),
];
const heldTables = new Map();

function showHeld(pools) {
  const place = $("held");
  const any = pools.some((pool) => pool.held.length);
  if (!place.firstChild) place.append(element("p", { className: "calm" }));
  write(place.firstChild, any ? "" : "Nothing waits: every request goes to a replica at once.");
  place.firstChild.hidden = any;
  for (const pool of pools) {
    const table = tableOf(heldTables, place, pool.name, HELD_COLUMNS);
    table.named(`Waiting for replicas of pool ${pool.name}`, pools.length > 1);
    table.node.hidden = !pool.held.length;
    table.show(pool.held, (one) => JSON.stringify([one.tenant, one.priority, one.model]));
  }
}

function showParts(news) {
  const facts = [];
  for (const pool of news.pools) {
    const of = news.pools.length > 1 ? ` of ${pool.name}` : "";
    const others = `this one and ${pool.other_routers} more, newest news ${seconds(pool.others_age_s)} old`;
    facts.push([`Routers${of}`, pool.other_routers ? others : "this one alone"]);
    const pollers = pool.pollers === null ? "not known: Redis does not answer" : pool.pollers.join(", ") || "none";
    facts.push([`Pollers${of}`, news.router.polls ? "this router polls the replicas itself" : pollers]);
  }
  facts.push(["Policy", news.router.policy]);
  showFacts($("parts"), facts);
}

function showAbout(router) {
  write($("router"), `router on ${router.host}, ${router.admin}`);
  const one = router.workers > 1 ? ` It has ${router.workers} workers; each has a page of its own, one port after the other.` : "";
  write(
    $("about"),
    `This page shows one router process as that process sees it, once a second.${one} Decisions, what waits and what was predicted are its own; ` +
      "what runs on the replicas is everybody’s. It changes nothing, and no prompt is in it.",
  );
}

// -- decisions -------------------------------------------------------------------------------

let decisions = null;

function showDecisions({ columns, rows }) {
  const request = columns.indexOf("request");
  decisions ??= new Table(
    [
      ...columns.map((name, at) =>
        at === request
          ? { name, head: true, className: "left", fill: link(at) }
          : text(at && columns[at] === "actual" ? `${columns[at - 1].replace(/ s$/, "")} actual` : name, (one) => one.figures[at], at < 3 ? { className: "left" } : {}),
      ),
      brief("model: why", (one) => one.why),
    ],
    "cards dense",
  ).named("Last decisions", false);
  if (!decisions.node.isConnected) $("decisions").replaceChildren(decisions.node);
  decisions.show(rows, (one) => one.number);
}

const link = (at) => (cell, one) => {
  if (!cell.firstChild) {
    const button = element("button", { type: "button", className: "link" });
    button.setAttribute("aria-haspopup", "dialog");
    button.addEventListener("click", () => openComparison(one.number));
    cell.append(button);
  }
  write(cell.firstChild, one.figures[at]);
  cell.title = one.figures[at];
};

async function openComparison(number) {
  const body = $("comparison-body");
  body.replaceChildren(element("p", { textContent: "…" }));
  $("comparison").showModal();
  try {
    const response = await ask(`dashboard/decision?number=${number}`);
    if (!response.ok) throw new Error((await response.text()).trim());
    body.replaceChildren(...comparisonOf(await response.json()));
  } catch (error) {
    body.replaceChildren(element("p", { textContent: `Not to be had: ${error.message}` }));
  }
}

function comparisonOf({ facts, columns, rows, legend, left_out: leftOut }) {
  const list = element("dl", { className: "facts" });
  for (const [name, value] of Object.entries(facts)) list.append(element("dt", { textContent: name }), element("dd", { textContent: value }));
  const table = new Table(
    columns.map((one, at) => text(one.header, (row) => row[at], { className: one.left ? "left" : "", head: one.header === "replica" })),
    "wide",
  ).named("Candidates, the chosen one first", false);
  table.show(rows, (row) => rows.indexOf(row), (row, cells) => classed(row, cells[0] ? "chosen" : ""));
  const parts = [list, element("h3", { textContent: "Candidates" }), table.node];
  parts.push(...legend.map((one) => element("p", { className: "note", textContent: one })));
  if (leftOut.length) {
    const out = element("dl", { className: "facts" });
    for (const [name, why] of leftOut) out.append(element("dt", { textContent: name }), element("dd", { textContent: why }));
    parts.push(element("h3", { textContent: "Left out" }), out);
  }
  return parts;
}

// -- the news --------------------------------------------------------------------------------

let last = null;
let heardAt = 0;
let paused = false;

function show(news) {
  const decided = news.pools.flatMap((pool) => pool.replicas.sent).reduce((sum, one) => sum + one, 0);
  showAbout(news.router);
  const named = (pool, warning) => (news.pools.length > 1 ? `Pool ${pool.name}: ${warning}` : warning);
  showWarnings([...news.warnings, ...news.pools.flatMap((pool) => pool.warnings.map((one) => named(pool, one)))]);
  showFigures(news, decided);
  showReplicas(news.pools, decided);
  $("main").hidden = false;
  showAccuracy(news.pools);
  showHeld(news.pools);
  showParts(news);
  showDecisions(news.decisions);
}

function say(words, lost = false) {
  write($("state"), words);
  classed($("state"), lost ? "state lost" : "state");
}

function ask(path, options = {}) {
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  return fetch(path, { ...options, headers, cache: "no-store" });
}

/** Follows the events until they end; fetch, for EventSource sends no token. */
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
    last = JSON.parse(events.at(-1).slice("data: ".length));
    heardAt = performance.now();
    if (!paused) {
      show(last);
      say("live");
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

/** Nobody who does not look costs the router anything. */
async function live() {
  for (let failures = 0; ; ) {
    await visible();
    const stop = new AbortController();
    const hidden = () => document.hidden && stop.abort();
    document.addEventListener("visibilitychange", hidden);
    const before = heardAt;
    try {
      await follow(stop.signal);
      failures = 0;
    } catch {
      if (!stop.signal.aborted) {
        say(last ? "no connection to the router: these figures are old" : "no connection to the router", true);
        failures = heardAt > before ? 0 : failures + 1;
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
      }
    }
    document.removeEventListener("visibilitychange", hidden);
  }
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  say(paused ? "paused" : "live");
  if (!paused && last) show(last);
});
setInterval(() => {
  if (last && !paused && !document.hidden && $("token-form").hidden && performance.now() - heardAt > STALE_MS) {
    say("no news from the router: these figures are old", true);
  }
}, 1000);
const redraw = () => last && showAccuracy(last.pools);
window.addEventListener("resize", redraw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
live();
