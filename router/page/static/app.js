"use strict";

// The page: what the cluster is (asked for every second) and what its last requests went through (told as it
// happens). Texts go into the document as text, never as HTML: what clients call their requests is theirs.

const MAX_ROWS = 16;
const byId = (id) => document.getElementById(id);
const timelines = new Map(); // id → timeline, with all its tokens
let clockLead = 0; // the server's clock less ours, in seconds
let ownRequest = null; // the request_id of the prompt sent from here

function element(kind, attributes = {}, ...children) {
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

function shape(kind, attributes, title = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (title !== null) {
    const told = document.createElementNS("http://www.w3.org/2000/svg", "title");
    told.textContent = title;
    made.append(told);
  }
  return made;
}

const inMs = (ms) => (ms < 10 ? ms.toFixed(1) : ms < 10000 ? ms.toFixed(0) : `${(ms / 1000).toFixed(1)}k`);
const duration = (ms) => (ms < 1000 ? `${inMs(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`);
const megabytes = (bytes) => `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`;
const perSecond = (rate) => (rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en"));

// ---- Pools

const ROLES = {
  ROLE_PREFILL: ["prefill", "Prefill: reads prompts"],
  ROLE_DECODE: ["decode", "Decode: makes tokens"],
  ROLE_COLOCATED: ["colocated", "Colocated: does both"],
};
// instance → {at, tokens, bytes}: of the last snapshots, for rates
const counts = new Map();

function rates(worker, role) {
  const counters = worker.counters || {};
  const made = role === "prefill" ? counters.tokens_prefilled : counters.tokens_decoded;
  const moved = role === "prefill" ? counters.kv_bytes_sent : counters.kv_bytes_received;
  const now = { at: performance.now() / 1000, tokens: Number(made || 0), bytes: Number(moved || 0) };
  const kept = counts.get(worker.instance_id) || [];
  kept.push(now);
  while (kept.length > 1 && now.at - kept[0].at > 5) kept.shift();
  counts.set(worker.instance_id, kept);
  const span = now.at - kept[0].at;
  if (span <= 0) return { tokens: 0, bytes: 0 };
  return { tokens: (now.tokens - kept[0].tokens) / span, bytes: (now.bytes - kept[0].bytes) / span };
}

function workerCard(worker, role) {
  const state = worker.state.replace("WORKER_STATE_", "").toLowerCase();
  const card = element("div", { class: `worker${state === "ready" ? "" : " away"}`, "data-worker": worker.id });
  card.append(element("div", { class: "top" }, element("b", {}, worker.id),
    element("span", {}, state === "ready" ? worker.device || "" : `${state} ${worker.detail || ""}`)));
  if (state === "stopped" || state === "dead" || state === "starting") return card;
  const load = worker.load || {}, total = (worker.limits || {}).kv_blocks_total || 0;
  const used = load.kv_blocks_used || 0, kept = load.kv_blocks_quarantined || 0;
  const rate = rates(worker, role);
  const bar = element("div", { class: "bar", title: `KV cache: ${used} of ${total} blocks in use` });
  const part = (count, name) => {
    const filled = element("i", name ? { class: name } : {});
    filled.style.width = `${total ? (100 * count) / total : 0}%`;
    return filled;
  };
  bar.append(part(used - kept, ""), part(kept, "kept"));
  const share = total ? `${((100 * used) / total).toFixed(0)} %` : "–";
  const doing = `${load.num_running || 0} running, ${load.num_waiting || 0} waiting`;
  const queued = Number(load.queued_prompt_tokens || 0);
  card.append(bar, element("div", { class: "what" },
    `KV memory ${share} · ${doing}${queued ? ` · ${queued} prompt tokens to read` : ""}`),
  element("div", { class: "what" }, `${perSecond(rate.tokens)} tokens/s · ${megabytes(rate.bytes)}/s of KV ` +
    (role === "prefill" ? "sent" : "received")));
  return card;
}

function showCluster(cluster) {
  byId("model").textContent = `${cluster.model} · ${cluster.name}`;
  const load = cluster.router || {};
  const pair = (quantiles) =>
    quantiles && quantiles.count ? `${inMs(quantiles.p50)} / ${inMs(quantiles.p99)}` : "–";
  byId("ttft").textContent = pair(load.ttft_ms);
  byId("itl").textContent = pair(load.itl_ms);
  byId("output-rate").textContent = perSecond(load.output_tokens_per_s || 0);
  byId("prompt-rate").textContent = perSecond(load.prompt_tokens_per_s || 0);
  byId("running").textContent = load.num_running || 0;
  byId("waiting").textContent = load.num_waiting || 0;
  const shown = [];
  for (const pool of cluster.pools) {
    const [role, title] = ROLES[pool.role] || ["other", pool.role];
    if (shown.length && role === "decode") shown.push(element("div", { class: "arrow" }, element("b", {}, "→"), "KV cache"));
    const box = element("div", { class: `pool ${role}` }, element("h3", {}, title));
    for (const worker of pool.workers) box.append(workerCard(worker, role));
    if (!pool.workers.length) box.append(element("p", { class: "note" }, "no worker"));
    if (pool.unrecoverable_reason) box.append(element("p", { class: "trouble" }, pool.unrecoverable_reason));
    shown.push(box);
  }
  byId("pools").replaceChildren(...shown);
}

// What every worker can hold of prompt and answer together bounds what may be asked for.
function limitTokens(cluster) {
  const limits = cluster.pools.flatMap((pool) => pool.workers).map((worker) => worker.limits || {});
  const known = limits.flatMap((each) => [each.max_model_len, each.max_sequence_tokens]).filter(Boolean);
  if (known.length) byId("max-tokens").max = Math.min(...known);
}

function setLink(text, kind) {
  byId("link").textContent = text;
  byId("link").className = `badge ${kind}`;
}

async function followCluster() {
  for (;;) {
    try {
      // A router that hangs refuses nothing. The controller has 10 s.
      const response = await fetch("/pdserve/cluster", { signal: AbortSignal.timeout(15000) });
      const answer = await response.json();
      if (!response.ok) throw new Error(answer.error ? answer.error.message : response.statusText);
      showCluster(answer);
      limitTokens(answer);
      setLink("live", "live");
    } catch (error) {
      setLink(error instanceof TypeError || error.name === "TimeoutError" ? "the router does not answer" : error.message, "lost");
    }
    await new Promise((done) => setTimeout(done, 1000));
  }
}

// ---- Timelines

// The phases of a request, in ms since it was received. A running one is known by its marks; when it has
// ended, the workers' own measures tell more.
function phases(timeline, nowMs) {
  const at = (moment) => {
    const mark = timeline.marks.find((each) => each.moment === moment);
    return mark ? mark.at_ms : null;
  };
  const lastAt = (moment) => timeline.marks.filter((each) => each.moment === moment).map((each) => each.at_ms).pop() ?? null;
  const finished = at("FINISHED"), end = finished ?? nowMs;
  const times = timeline.timings, first = at("FIRST_TOKEN");
  const queued = times ? times.queue_ms : at("PREFILL_BEGIN") ?? end;
  // What a resumed one had begun before may have been lost with its worker.
  const begun = times && timeline.num_resumes && first !== null ? Math.max(queued, first - times.prefill_ms) : queued;
  const drawn = times ? begun + times.prefill_ms : at("PREFILL_END") ?? first;
  const found = { queue: [0, queued], prefill: null, transfer: null, decode: null, first, end };
  if (begun < end) found.prefill = [begun, Math.min(drawn ?? end, first ?? end)];
  const arrived = lastAt("TRANSFER_END");
  if (times && times.transfer_bytes && arrived !== null) found.transfer = [Math.max(begun, arrived - times.transfer_ms), arrived];
  else if (!times && first !== null && at("PREFILL_END") !== null) found.transfer = [drawn, arrived ?? Math.min(end, at("DECODE_BEGIN") ?? end)];
  const last = timeline.tokens.at_ms.length ? timeline.tokens.at_ms[timeline.tokens.at_ms.length - 1] : null;
  // Of a very long answer the last deliveries are not told.
  if (first !== null && last !== null) found.decode = [first, finished === null ? end : Math.max(times ? first + times.decode_ms : last, first)];
  return found;
}

function picture(timeline, found, scaleMs, height) {
  const width = 1000, x = (ms) => ((width - 4) * ms) / scaleMs, lane = height / 2 - 2;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img" });
  const box = (name, span, y, title) => {
    if (!span || span[1] <= span[0]) return;
    const wide = Math.max(1.5, x(span[1]) - x(span[0]));
    const isOpen = name === "prefill" && found.first === null; // it may wait at the worker still
    svg.append(shape("rect", { class: isOpen ? `${name} open` : name, x: x(span[0]), y, width: wide, height: lane, "data-phase": name },
      `${title}: ${duration(span[1] - span[0])}`));
  };
  svg.append(shape("line", { class: "base", x1: 0, x2: width, y1: height / 2, y2: height / 2 }));
  box("queue", found.queue, 0, "queue");
  box("prefill", found.prefill, 0, `prefill of ${timeline.prompt_tokens} tokens`);
  box("decode", found.decode, lane + 4, "decode");
  const transferTitle = timeline.timings ? `transfer of ${megabytes(timeline.timings.transfer_bytes)}` : "transfer";
  const thin = found.transfer ? shape("rect", { class: "transfer", x: x(found.transfer[0]), y: lane - 1,
    width: Math.max(2, x(found.transfer[1]) - x(found.transfer[0])), height: 6, "data-phase": "transfer" },
  `${transferTitle}: ${duration(found.transfer[1] - found.transfer[0])}`) : null;
  const strokes = timeline.tokens.at_ms.slice(1).map((ms) => `M${x(ms).toFixed(1)} ${lane + 5}v${lane - 2}`).join("");
  if (strokes) svg.append(shape("path", { class: "tokens", d: strokes, "vector-effect": "non-scaling-stroke" }));
  if (thin) svg.append(thin);
  if (found.first !== null) {
    svg.append(shape("path", { class: "first", d: `M${x(found.first)} 0V${height}`, "vector-effect": "non-scaling-stroke" },
      `first token after ${duration(found.first)}`));
  }
  return svg;
}

// The last one: a request that lost its workers has had several.
function workerAt(timeline, moment) {
  return (timeline.marks.filter((each) => each.moment === moment && each.worker).pop() || {}).worker;
}

function workersOf(timeline) {
  const prefill = workerAt(timeline, "PREFILL_BEGIN");
  const decode = workerAt(timeline, "DECODE_BEGIN") || workerAt(timeline, "RESERVED");
  return [...new Set([prefill, decode].filter(Boolean))].join(" → ");
}

const OUTCOMES = { FINISH_REASON_EOS: "ended", FINISH_REASON_STOP: "stopped", FINISH_REASON_LENGTH: "at its limit" };

function row(timeline, scaleMs, height) {
  const nowMs = (Date.now() / 1000 + clockLead - timeline.received_time) * 1000;
  const found = phases(timeline, nowMs), isRunning = timeline.outcome === null;
  const how = isRunning ? (found.prefill ? (found.first === null ? `at ${workerAt(timeline, "PREFILL_BEGIN")}` : "decoding") : "in the queue")
    : OUTCOMES[timeline.outcome] || timeline.outcome.toLowerCase().replaceAll("_", " ");
  const isFailed = !isRunning && !(timeline.outcome in OUTCOMES);
  const cached = timeline.cached_tokens ? ` (${timeline.cached_tokens} cached)` : "";
  const made = element("li", { class: `row${isRunning ? " running" : ""}`, "data-request": timeline.request_id, "data-how": how });
  const resumed = timeline.num_resumes ? ` · resumed ${timeline.num_resumes}×` : "";
  made.append(
    element("div", { class: "who", title: timeline.request_id },
      `${timeline.prompt_tokens}${cached} → ${timeline.output_tokens} tokens`, element("br"), element("span", {}, workersOf(timeline) || "…")),
    picture(timeline, found, scaleMs || found.end, height),
    element("div", { class: `end${isFailed ? " failed" : ""}` },
      `${duration(found.end)} · ${how}${resumed}`, element("br"), found.first === null ? "" : `first token ${duration(found.first)}`));
  return made;
}

function showRequests() {
  const newest = [...timelines.values()].sort((a, b) => b.received_time - a.received_time);
  const own = newest.find((each) => each.request_id === ownRequest);
  for (const old of newest.slice(100)) if (old !== own) timelines.delete(old.id);
  const rows = newest.slice(0, MAX_ROWS), now = Date.now() / 1000 + clockLead;
  const length = (each) => (each.marks.find((mark) => mark.moment === "FINISHED") || { at_ms: (now - each.received_time) * 1000 }).at_ms;
  const scaleMs = byId("scale").value === "same" ? Math.max(...rows.map(length), 1) : null;
  byId("requests").replaceChildren(...rows.map((each) => row(each, scaleMs, 34)));
  byId("none").hidden = rows.length > 0;
  byId("own").hidden = !own;
  if (own) {
    byId("own").replaceChildren(row(own, null, 46));
    if (own.timings) tell(own);
  }
  if ([own, ...rows].some((each) => each && each.outcome === null)) draw(); // what runs grows
}

let isDrawing = false;
function draw() {
  if (isDrawing) return;
  isDrawing = true;
  setTimeout(() => {
    isDrawing = false;
    showRequests();
  }, 200);
}

let source = null; // the stream of requests

function followRequests() {
  if (source) source.close();
  // Of connections to one server a browser has six, for all its tabs: those that nobody looks at need none.
  if (document.hidden) return;
  // The own one is told of however many have come after it.
  const opened = source = new EventSource(ownRequest ? `/pdserve/requests?request_id=${ownRequest}` : "/pdserve/requests");
  // A stream begins with all that is known: what another router told before is over.
  source.onopen = () => {
    for (const each of timelines.values()) if (each.request_id !== ownRequest || each.outcome === null) timelines.delete(each.id);
  };
  // A browser gives up by itself where it got an error, such as a proxy's while the router is away.
  source.onerror = () => {
    if (opened.readyState === EventSource.CLOSED) setTimeout(() => { if (opened === source) followRequests(); }, 1000);
  };
  source.onmessage = (message) => {
    const told = JSON.parse(message.data);
    clockLead = told.now - Date.now() / 1000;
    for (const fresh of told.requests) {
      const known = timelines.get(fresh.id), { start, at_ms, counts: numbers } = fresh.tokens;
      const before = known && start ? known.tokens : { at_ms: [], counts: [] };
      fresh.tokens = { at_ms: [...before.at_ms.slice(0, start), ...at_ms], counts: [...before.counts.slice(0, start), ...numbers] };
      timelines.set(fresh.id, fresh);
    }
    draw();
  };
}

// ---- Try it

let asking = null; // aborts the prompt that is being answered

function tell(own) {
  const times = own.timings, computed = own.prompt_tokens - own.cached_tokens, told = [];
  const of = (moment) => workerAt(own, moment);
  const cached = own.cached_tokens ? ` (${own.cached_tokens} were cached from before)` : "";
  const rate = times.prefill_ms && computed >= 32 ? `, ${perSecond((computed / times.prefill_ms) * 1000)} tokens/s` : "";
  told.push(`${of("PREFILL_BEGIN")} read the ${own.prompt_tokens} tokens of your prompt${cached} in ${duration(times.prefill_ms)}${rate}: all at once.`);
  if (times.transfer_bytes) {
    const hidden = Math.round((100 * times.hidden_bytes) / times.transfer_bytes);
    told.push(`${megabytes(times.transfer_bytes)} of KV cache went to ${of("DECODE_BEGIN")}, ${hidden} % of it before the first token was drawn.`);
  }
  if (times.mean_itl_ms) {
    told.push(`${of("DECODE_BEGIN")} then made ${own.output_tokens - 1} more tokens, one after the other, each in ` +
      `${duration(times.mean_itl_ms)}: ${perSecond(1000 / times.mean_itl_ms)} tokens/s.`);
  }
  byId("told").textContent = told.join(" ");
  byId("told").hidden = false;
}

async function ask(signal) {
  const isChat = byId("is-chat").checked, text = byId("prompt").value;
  const body = { max_tokens: Number(byId("max-tokens").value), temperature: 0, stream: true, request_id: ownRequest };
  Object.assign(body, isChat ? { messages: [{ role: "user", content: text }] } : { prompt: text });
  const response = await fetch(isChat ? "/v1/chat/completions" : "/v1/completions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) byId("answer").textContent += (isChat ? choice.delta.content : choice.text) || "";
    }
  }
}

function refuse(event) {
  event.preventDefault(); // said below in place of the browser's own words
  const field = event.target, most = field.max ? ` to ${field.max}, which is what prompt and answer may have together` : "";
  byId("answer").className = "failed";
  byId("answer").textContent = `“at most … tokens” takes a whole number from 1${most}.`;
  byId("answer").hidden = false;
  byId("told").hidden = true;
  field.focus();
}

async function send(event) {
  event.preventDefault();
  asking = new AbortController();
  ownRequest = `page-${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
  followRequests();
  byId("answer").textContent = "";
  byId("answer").className = "";
  byId("answer").hidden = false;
  byId("told").hidden = true;
  byId("send").disabled = true;
  byId("stop").disabled = false;
  try {
    await ask(asking.signal);
  } catch (error) {
    if (error.name !== "AbortError") {
      byId("answer").className = "failed";
      byId("answer").textContent += `\n${error.message}`;
    }
  }
  byId("send").disabled = false;
  byId("stop").disabled = true;
}

byId("ask").addEventListener("submit", send);
byId("max-tokens").addEventListener("invalid", refuse);
byId("stop").addEventListener("click", () => asking.abort());
byId("scale").addEventListener("change", showRequests);
document.addEventListener("visibilitychange", followRequests);
followCluster();
followRequests();
