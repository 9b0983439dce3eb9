// SPDX-License-Identifier: Apache-2.0
// A chat with the server that this page came from. What a model has written becomes text nodes and nothing else.
"use strict";

const $ = (id) => document.getElementById(id);
const KEPT = "lily";
const DEFAULTS = { system: "", tools: "", temperature: "", top_p: "", max_tokens: "", thinking: true, key: "" };

let messages = []; // OpenAI's form; the assistant's may have reasoning_content and tool_calls
let settings = { ...DEFAULTS };
let running = null; // the AbortController of the reply that is being written

// ---- what is kept in this browser
function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEPT)) ?? {};
    messages = Array.isArray(kept.messages) ? kept.messages : [];
    settings = { ...DEFAULTS, ...kept.settings };
  } catch {
    messages = [];
  }
}

function save() {
  try {
    localStorage.setItem(KEPT, JSON.stringify({ messages, settings }));
  } catch {} // full, or not allowed: the chat lasts as long as the page
}

// ---- showing
function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Bold and code inside of a line.
function inline(parent, text) {
  for (const part of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    if (part.length > 2 && part.startsWith("`")) parent.append(element("code", part.slice(1, -1)));
    else if (part.length > 4 && part.startsWith("**")) parent.append(element("b", part.slice(2, -2)));
    else if (part) parent.append(part);
  }
}

function paragraphs(parent, text) {
  for (const block of text.split(/\n{2,}/)) {
    if (!block.trim()) continue;
    const heading = /^#{1,6} (.*)$/.exec(block);
    const made = element(heading ? "h3" : "p");
    inline(made, heading ? heading[1] : block.replace(/^\n+|\n+$/g, ""));
    parent.append(made);
  }
}

function codeBlock(text) {
  const frame = element("div", undefined, "code");
  const pre = element("pre");
  pre.append(element("code", text));
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.addEventListener("click", () => navigator.clipboard?.writeText(text));
  frame.append(pre, copy);
  return frame;
}

function showContent(parent, text) {
  text.split(/^```.*$/m).forEach((part, number) => {
    if (number % 2 === 0) paragraphs(parent, part);
    else parent.append(codeBlock(part.replace(/^\n|\n$/g, "")));
  });
}

function fill(article, message) {
  const opened = article.querySelector("details")?.open ?? false;
  article.replaceChildren();
  if (message.reasoning_content) {
    const details = element("details");
    details.open = opened;
    details.append(element("summary", "Thoughts"), element("div", message.reasoning_content));
    article.append(details);
  }
  if (message.role === "assistant") showContent(article, message.content ?? "");
  else article.textContent = message.content;
  for (const call of message.tool_calls ?? []) {
    const box = element("div", undefined, "call");
    box.append("calls ", element("b", call.function.name), element("pre", call.function.arguments));
    article.append(box);
  }
}

function show(message) {
  const article = element("article", undefined, message.role);
  article.setAttribute("aria-label", { user: "You", assistant: "Lily", tool: "Result of a tool" }[message.role]);
  fill(article, message);
  $("messages").append(article);
  return article;
}

function redraw() {
  $("messages").querySelectorAll("article").forEach((article) => article.remove());
  messages.forEach(show);
  refresh();
  $("messages").scrollTop = $("messages").scrollHeight;
}

function pendingCalls() {
  const answered = new Set(messages.filter((m) => m.role === "tool").map((m) => m.tool_call_id));
  return (messages.at(-1)?.role === "user" ? [] : messages.flatMap((m) => m.tool_calls ?? []))
    .filter((call) => !answered.has(call.id));
}

function refresh() {
  const last = messages.at(-1);
  const [call] = pendingCalls();
  $("empty").hidden = messages.length > 0;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("again").hidden = running !== null || !messages.some((m) => m.role === "user");
  $("edit").hidden = running !== null || !messages.some((m) => m.role === "user");
  $("text").placeholder = call ? `Result of ${call.function.name}` : "Message";
  $("again").textContent = last && last.role !== "assistant" ? "Try again" : "Regenerate";
}

function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

// ---- asking
function headers() {
  const key = settings.key ? { Authorization: `Bearer ${settings.key}` } : {};
  return { "Content-Type": "application/json", ...key };
}

function body() {
  const asked = { model: "lily", stream: true, stream_options: { include_usage: true } };
  asked.messages = [...(settings.system ? [{ role: "system", content: settings.system }] : []), ...messages];
  for (const name of ["temperature", "top_p", "max_tokens"]) {
    if (settings[name] !== "") asked[name] = Number(settings[name]);
  }
  if (settings.tools.trim()) asked.tools = JSON.parse(settings.tools);
  asked.chat_template_kwargs = { enable_thinking: settings.thinking };
  return JSON.stringify(asked);
}

// The objects of a stream of server-sent events; a comment is given as text.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith(": ")) yield part.slice(2);
      else if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

function take(reply, delta) {
  reply.content += delta.content ?? "";
  if (delta.reasoning_content) reply.reasoning_content = (reply.reasoning_content ?? "") + delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) {
    reply.tool_calls ??= [];
    const call = (reply.tool_calls[part.index] ??= { type: "function", function: { name: "", arguments: "" } });
    call.id ??= part.id;
    call.function.name += part.function.name ?? "";
    call.function.arguments += part.function.arguments;
  }
}

function figures(event) {
  const t = event.timings;
  if (!t) return;
  $("figures").textContent =
    `${t.predicted_n} tokens, ${t.predicted_per_second.toFixed(1)} tok/s; ` +
    `prompt ${t.prompt_n + t.cache_n} (${t.cache_n} cached), ${(t.prompt_ms / 1000).toFixed(1)} s`;
}

// Shows the reply as it is now, and keeps its end in view if it was there.
function draw(article, reply) {
  const view = $("messages");
  const atEnd = view.scrollHeight - view.scrollTop - view.clientHeight < 60;
  fill(article, reply);
  if (atEnd) view.scrollTop = view.scrollHeight;
}

// Several events may come between two pictures of the screen; the reply is drawn once for all of them.
async function read(response, reply, article) {
  let asked = 0;
  try {
    for await (const event of events(response)) {
      if (typeof event === "string") {
        $("figures").textContent = event;
        continue;
      }
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) take(reply, choice.delta);
      figures(event);
      asked ||= requestAnimationFrame(() => {
        asked = 0;
        draw(article, reply);
      });
    }
  } finally {
    cancelAnimationFrame(asked);
    draw(article, reply);
  }
}

async function ask() {
  problem("");
  const chat = messages; // a new one may be begun before the end of this reply
  const reply = { role: "assistant", content: "" };
  let article = null;
  running = new AbortController();
  refresh();
  try {
    const how = { method: "POST", headers: headers(), body: body(), signal: running.signal };
    const response = await fetch("/v1/chat/completions", how);
    if (!response.ok) throw new Error((await response.json()).error?.message ?? `status ${response.status}`);
    article = show(reply);
    await read(response, reply, article);
  } catch (error) {
    if (error.name !== "AbortError" && chat === messages) problem(error.message);
  }
  if (chat !== messages) return;
  running = null;
  if (reply.tool_calls) reply.tool_calls = reply.tool_calls.filter(isComplete);
  if (reply.content || reply.reasoning_content || reply.tool_calls?.length) messages.push(reply);
  else article?.remove();
  save();
  refresh();
  $("text").focus();
}

function isComplete(call) {
  try {
    return Boolean(JSON.parse(call.function.arguments));
  } catch {
    return false;
  }
}

function send() {
  const text = $("text").value;
  if (running || !text.trim()) return;
  const [call] = pendingCalls();
  const message = call ? { role: "tool", tool_call_id: call.id, content: text } : { role: "user", content: text };
  messages.push(message);
  show(message);
  $("text").value = "";
  save();
  refresh();
  $("messages").scrollTop = $("messages").scrollHeight;
  if (!pendingCalls().length) ask();
}

function lastQuestion() {
  return messages.findLastIndex((message) => message.role === "user");
}

// ---- controls
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !$("settings").open) running.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => {
  running?.abort();
  running = null;
  messages = [];
  $("figures").textContent = "";
  problem("");
  save();
  redraw();
  $("text").focus();
});
$("again").addEventListener("click", () => {
  if (messages.at(-1).role === "assistant") messages.length = lastQuestion() + 1;
  redraw();
  ask();
});
$("edit").addEventListener("click", () => {
  const place = lastQuestion();
  $("text").value = messages[place].content;
  messages.length = place; // what is kept in this browser stays until the new message is sent
  redraw();
  $("text").focus();
});
$("open-settings").addEventListener("click", () => {
  for (const [name, value] of Object.entries(settings)) {
    const field = $("settings").querySelector(`[name=${name}]`);
    if (field?.type === "checkbox") field.checked = value;
    else if (field) field.value = value;
  }
  $("settings").showModal();
});
$("settings").addEventListener("close", () => {
  for (const field of $("settings").querySelectorAll("[name]")) {
    settings[field.name] = field.type === "checkbox" ? field.checked : field.value;
  }
  problem("");
  try {
    if (settings.tools.trim() && !Array.isArray(JSON.parse(settings.tools))) throw new Error("not a list");
  } catch (error) {
    problem(`Tools are left out: ${error.message}`);
    settings.tools = "";
  }
  save();
});

load();
redraw();
fetch("/v1/models", { headers: headers() })
  .then((response) => (response.ok ? response.json() : Promise.reject()))
  .then((models) => { $("model").textContent = models.data[0].id; })
  .catch(() => {});
