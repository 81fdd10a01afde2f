// What the page shows of one snapshot, section by section.

import { showDecisions } from "./decisions.js";
import { $, classed, count, element, known, meter, percent, seconds, tableOf, text, tokens, twoLines, write } from "./elements.js";
import { draw } from "./scatter.js";

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
  showFacts($("figures"), [
    ["replicas in use", `${usable} of ${replicas.length}`],
    ["requests in flight, of this router", count(news.pools.reduce((sum, pool) => sum + pool.in_flight, 0))],
    ["waiting at this router", count(news.pools.reduce((sum, pool) => sum + pool.waiting, 0))],
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

export function showAccuracy(pools) {
  for (const pool of pools) {
    const [heading, canvas, caption] = figureOf(pool.name).children;
    write(heading, `Pool ${pool.name}`);
    heading.hidden = pools.length < 2;
    const { p10, p50, p90 } = pool.actual_to_predicted;
    const summary = pool.ended
      ? `Of the last ${count(pool.ended)} requests that ended, half took at most ${p50.toFixed(2)} ` +
        `times as long as predicted, and eight of ten between ${p10.toFixed(2)} and ${p90.toFixed(2)} times: the band.`
      : "No request ended in the last 5 minutes whose end was seen.";
    write(caption, summary);
    canvas.setAttribute("aria-label", summary);
    canvas.hidden = !pool.ended;
    if (pool.ended) draw(canvas, pool.points, [p10, p50, p90]);
  }
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
  const all = pools.reduce((sum, pool) => sum + pool.waiting, 0);
  const listed = pools.flatMap((pool) => pool.held).reduce((sum, one) => sum + one.requests, 0);
  if (!place.firstChild) place.append(element("p", { className: "calm" }));
  write(place.firstChild, all ? `And ${count(all - listed)} more.` : "Nothing waits: every request goes to a replica at once.");
  place.firstChild.hidden = all > 0 && all === listed;
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

// -- all of it -------------------------------------------------------------------------------

export function show(news) {
  const decided = news.pools.flatMap((pool) => pool.replicas.sent).reduce((sum, one) => sum + one, 0);
  showAbout(news.router);
  const named = (pool, warning) => (news.pools.length > 1 ? `Pool ${pool.name}: ${warning}` : warning);
  showWarnings([...news.warnings, ...news.pools.flatMap((pool) => pool.warnings.map((one) => named(pool, one)))]);
  showFigures(news, decided);
  showReplicas(news.pools, decided);
  showAccuracy(news.pools);
  showHeld(news.pools);
  showParts(news);
  showDecisions(news.decisions);
}
