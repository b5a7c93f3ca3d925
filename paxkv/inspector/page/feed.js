// Receives frames: from the server's event stream, or from a trace that the server replays.

const RETRY_MS = [500, 1000, 2000, 5000];

// Reads the feed until `signal` aborts it, and reconnects after every failure.
export async function follow(signal, handlers) {
  for (let attempt = 0; !signal.aborted; attempt++) {
    try {
      const response = await fetch("/inspector/events", { signal, cache: "no-store", headers: authorization() });
      if (response.status === 401 && askForKey()) { attempt = -1; continue; }
      if (!response.ok) throw new Error(await errorOf(response));
      await readEvents(response.body, (name, data) => {
        if (name === "snapshot") attempt = 0;
        handlers.event(name, data);
      });
      throw new Error("the server ended the stream.");
    } catch (error) {
      if (signal.aborted) return;
      handlers.lost(error.message || String(error));
    }
    await new Promise((done) => setTimeout(done, RETRY_MS[Math.min(attempt < 0 ? 0 : attempt, 3)]));
  }
}

let apiKey = "";
export const authorization = () => (apiKey ? { Authorization: `Bearer ${apiKey}` } : {});

function askForKey() {
  const given = window.prompt("This server requires an API key. The key is kept in this tab only.");
  apiKey = given || "";
  return Boolean(given);
}

async function readEvents(body, handle) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let parts = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    parts.push(value);
    // A snapshot arrives in many pieces; join them only when its end has arrived.
    if (!value.includes("\n\n") && !(value.startsWith("\n") && parts.length > 1)) continue;
    const events = parts.join("").split("\n\n");
    parts = [events.pop()];
    for (const event of events) {
      const newline = event.indexOf("\n");
      if (!event.startsWith("event: ") || newline < 0) continue;
      handle(event.slice(7, newline), JSON.parse(event.slice(newline + 7)));
    }
  }
}

// Sends a trace and calls `onLine` with each line of the answer.
export async function replay(file, signal, onLine) {
  const response = await fetch("/inspector/trace", {
    method: "POST", body: file, signal,
    headers: { "Content-Type": "application/octet-stream", ...authorization() },
  });
  if (!response.ok) throw new Error(await errorOf(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let parts = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    parts.push(value);
    if (!value.includes("\n")) continue;
    const lines = parts.join("").split("\n");
    parts = [lines.pop()];
    for (const line of lines) if (line) onLine(JSON.parse(line));
  }
}

export async function askBlock(id, holder, signal) {
  const response = await fetch(`/inspector/blocks/${id}?holder=${holder}`, { signal, headers: authorization() });
  if (!response.ok) throw new Error(await errorOf(response));
  return response.json();
}

async function errorOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `the server answered ${response.status}.`;
  }
}
