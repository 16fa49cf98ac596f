"use strict";

// What the model writes reaches the page as text nodes only, never as HTML.

const $ = (id) => document.getElementById(id);
const messages = []; // the conversation, as the interface takes it
let running = null; // AbortController of the answer under way

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Fenced code, `code` and **bold**; all else as it stands.
function render(target, text) {
  target.replaceChildren();
  text.split(/^```/m).forEach((part, i) => {
    if (i % 2) {
      const end = part.indexOf("\n");
      const pre = element("pre");
      pre.tabIndex = 0;
      pre.append(element("code", "", end < 0 ? "" : part.slice(end + 1)));
      target.append(pre);
      return;
    }
    const rest = i ? part.replace(/^\n/, "") : part;
    for (const paragraph of rest.split(/\n{2,}/)) {
      if (paragraph.trim()) target.append(inline(paragraph.replace(/^\n+|\n+$/g, "")));
    }
  });
}

function inline(text) {
  const paragraph = element("p");
  for (const part of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    if (/^`[^`]+`$/.test(part)) paragraph.append(element("code", "", part.slice(1, -1)));
    else if (/^\*\*[^*]+\*\*$/.test(part)) paragraph.append(element("strong", "", part.slice(2, -2)));
    else paragraph.append(part);
  }
  return paragraph;
}

function add(kind, who) {
  const article = element("article", `message ${kind}`);
  article.append(element("h2", "", who));
  $("log").append(article);
  return article;
}

// A message of the model while it comes.
class Answer {
  constructor() {
    this.article = add("assistant", $("model").textContent);
    this.details = element("details", "thinking");
    this.details.hidden = true;
    this.summary = element("summary", "", "Thinking");
    this.thought = element("p");
    this.details.append(this.summary, this.thought);
    this.body = element("div");
    this.article.append(this.details, this.body);
    this.text = this.thinking = "";
    this.calls = [];
    this.drawn = true;
    this.scheduled = false;
  }

  take(delta) {
    if (delta.content_was_reasoning) this.text = "";
    if (delta.reasoning_content) this.thinking += delta.reasoning_content;
    if (delta.content) this.text += delta.content;
    for (const call of delta.tool_calls || []) this.calls.push(call);
    if (!this.scheduled) {
      this.scheduled = true;
      setTimeout(() => this.draw(), 50);
    }
  }

  draw() {
    this.scheduled = false;
    const log = $("log");
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    this.details.hidden = !this.thinking;
    this.thought.textContent = this.thinking.trim();
    this.summary.textContent = this.text ? "Thought" : "Thinking";
    render(this.body, this.text);
    for (const call of this.calls) {
      this.body.append(element("p", "note", `wants to call ${call.function.name}:`));
      this.body.append(element("pre", "", call.function.arguments));
    }
    if (follow) log.scrollTop = log.scrollHeight;
  }

  note(text, isError) {
    const note = element("p", isError ? "note error" : "note", text);
    if (isError) note.setAttribute("role", "alert");
    this.article.append(note);
    $("log").scrollTop = $("log").scrollHeight;
  }
}

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function body() {
  const system = $("system").value.trim();
  const sent = { stream: true, stream_options: { include_usage: true } };
  sent.messages = system ? [{ role: "system", content: system }, ...messages] : messages;
  if ($("temperature").value) sent.temperature = Number($("temperature").value);
  if ($("most").value) sent.max_tokens = Number($("most").value);
  if ($("thinking").value) sent.chat_template_kwargs = { thinking_mode: $("thinking").value };
  return JSON.stringify(sent);
}

// The objects of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    pending += value;
    const parts = pending.split("\n\n");
    pending = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

async function ask(text) {
  const article = add("user", "You");
  render(article.appendChild(element("div")), text);
  messages.push({ role: "user", content: text });
  const answer = new Answer();
  let finish = null;
  let broken = [];
  let usage = null;
  let problem = null;
  begin();
  const controller = running;
  try {
    const options = { method: "POST", headers: headers(), body: body(), signal: controller.signal };
    const response = await fetch("v1/chat/completions", options);
    if (!response.ok) throw new Error(await refusal(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      for (const choice of event.choices) {
        answer.take(choice.delta);
        finish = choice.finish_reason || finish;
        broken = choice.broken_tool_calls || broken;
      }
    }
    if (!finish) throw new Error("the connection was lost");
  } catch (error) {
    problem = error;
  }
  answer.draw();
  if (!answer.article.isConnected) return; // a new chat has begun meanwhile
  const stopped = controller.signal.aborted;
  if (stopped) answer.note("stopped");
  else if (problem) answer.note(problem.message, true);
  else if (finish === "length") answer.note("cut: the limit of tokens, or the context is full");
  for (const call of broken) answer.note(`a call of a tool that is not whole (${call.why}): ${call.text}`);
  if (answer.text || answer.thinking) {
    messages.push({ role: "assistant", content: answer.text, reasoning_content: answer.thinking || null });
  } else if (problem) {
    messages.pop(); // nothing came: the message can be sent again
    if (!$("text").value) $("text").value = text;
  }
  end(stopped ? "Stopped." : problem ? "Failed." : `Answered${usage ? `, ${usage.total_tokens} tokens so far` : ""}.`);
}

function begin() {
  running = new AbortController();
  $("log").setAttribute("aria-busy", "true");
  $("log").scrollTop = $("log").scrollHeight;
  $("status").textContent = "The model is at work.";
  $("send").hidden = true;
  $("stop").hidden = false;
}

function end(text) {
  running = null;
  $("log").setAttribute("aria-busy", "false");
  $("status").textContent = text;
  const hadFocus = document.activeElement === $("stop");
  $("send").hidden = false;
  $("stop").hidden = true;
  if (hadFocus) $("text").focus();
}

function stop() {
  if (running) running.abort();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value;
  if (running || !text.trim()) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", () => {
  stop();
  messages.length = 0;
  $("log").replaceChildren();
  end("New chat.");
  $("text").focus();
});

async function showModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.ok) $("model").textContent = (await response.json()).data[0].id;
  else if (response.status === 401) {
    $("settings").open = true;
    $("status").textContent = "This server asks for an API key: see Settings.";
  }
}
$("key").addEventListener("change", showModel);
showModel();
$("text").focus();
