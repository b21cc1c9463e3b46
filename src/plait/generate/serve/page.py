"""The web page of `plait serve`: one file, nothing loaded from elsewhere.

A link may bring the token behind the `#`, which browsers do not send: `#token=…`.
"""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Plait</title>
<style>
  :root { color-scheme: light dark; --line: #8884; --soft: #8881; --accent: #2f6f4f; }
  * { box-sizing: border-box; }
  body { font: 16px/1.55 system-ui, sans-serif; margin: 0; height: 100dvh; display: flex; flex-direction: column; }
  header, form { padding: .75rem max(1rem, calc(50vw - 24rem)); display: flex; gap: .6rem; align-items: center; }
  header { border-bottom: 1px solid var(--line); }
  header b { margin-right: auto; }
  main { flex: 1; overflow-y: auto; padding: 1rem max(1rem, calc(50vw - 24rem)); }
  form { border-top: 1px solid var(--line); align-items: end; }
  .turn { white-space: pre-wrap; overflow-wrap: anywhere; padding: .6rem .9rem; border-radius: .8rem;
          margin: 0 0 .7rem; width: fit-content; max-width: 100%; border: 1px solid var(--line); }
  .user { background: var(--accent); color: #fff; margin-left: auto; border: 0; }
  .error { border-color: #c33; color: #c33; }
  textarea, input, button { font: inherit; color: inherit; border: 1px solid var(--line); border-radius: .6rem;
          padding: .5rem .75rem; background: var(--soft); }
  textarea { flex: 1; resize: none; }
  input { width: 9rem; } input[type=number] { width: 5rem; }
  button { cursor: pointer; } button[type=submit] { background: var(--accent); color: #fff; border: 0; }
  label { font-size: .85rem; opacity: .8; }
</style>
<header>
  <b id="model">Plait</b>
  <label>temperature <input id="temperature" type="number" min="0" max="2" step="0.1" value="0.8"></label>
  <input id="token" type="password" placeholder="token" aria-label="token" autocomplete="off">
  <button id="new" type="button">New</button>
</header>
<main id="log" aria-live="polite"></main>
<form id="form">
  <textarea id="text" rows="2" placeholder="Say something" aria-label="message" autofocus></textarea>
  <button type="submit" id="send">Send</button>
</form>
<script>
const $ = (id) => document.getElementById(id);
const hash = new URLSearchParams(location.hash.slice(1));
let turns = [], running = null;
$("token").value = hash.get("token") || sessionStorage.getItem("token") || "";
history.replaceState(null, "", location.pathname);

function show(role, text) {
  const box = document.createElement("div");
  box.className = "turn " + role;
  box.textContent = text;
  $("log").append(box);
  box.scrollIntoView({block: "end"});
  return box;
}
async function problem(answer) {
  try { return (await answer.json()).error.message; } catch { return answer.status + " " + answer.statusText; }
}
function headers() {
  sessionStorage.setItem("token", $("token").value);
  return {"Content-Type": "application/json", "Authorization": "Bearer " + $("token").value};
}
async function ask(text) {
  turns.push({role: "user", content: text});
  show("user", text);
  const box = show("assistant", "");
  let said = "";
  running = new AbortController();
  $("send").textContent = "Stop";
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), signal: running.signal,
      body: JSON.stringify({messages: turns, temperature: Number($("temperature").value), stream: true}),
    });
    if (!answer.ok) throw new Error(await problem(answer));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const {value, done} = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new Error(event.error.message);
        said += event.choices[0]?.delta?.content ?? "";
        box.textContent = said;
        box.scrollIntoView({block: "end"});
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") { show("error", error.message); }
  }
  if (said) turns.push({role: "assistant", content: said}); else { turns.pop(); box.remove(); }
  running = null;
  $("send").textContent = "Send";
}
$("form").onsubmit = (event) => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const text = $("text").value.trim();
  if (text) { $("text").value = ""; ask(text); }
};
$("text").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) $("form").requestSubmit();
  }
};
$("new").onclick = () => { if (running) running.abort(); turns = []; $("log").replaceChildren(); $("text").focus(); };
fetch("v1/models", {headers: headers()}).then(async (answer) => {
  if (!answer.ok) return;
  $("model").textContent = document.title = (await answer.json()).data[0].id;
  $("token").hidden = $("token").value === "";  // none was asked for
});
</script>
</html>
"""
