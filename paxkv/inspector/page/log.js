// The event log, newest first. Shows only events up to the moment in view.

const MAX_ENTRIES = 500, MAX_ROWS = 60;

export class EventLog {
  constructor(list) {
    this.list = list;
    this.entries = []; // {at, kind, text}
    this.shown = "";
  }

  get length() { return this.entries.length; }

  add(entry, state) {
    for (const event of entry.events) {
      this.entries.push({ at: entry.frame.at_s, kind: event.kind, text: describe(event, state) });
    }
    if (this.entries.length > MAX_ENTRIES) this.entries.splice(0, this.entries.length - MAX_ENTRIES);
  }

  reset(history) {
    this.entries = [];
    for (const entry of history.frames) this.add(entry, history.head);
  }

  draw(history, index) {
    const now = history.frames[index].frame.at_s;
    const start = history.frames[0].frame.at_s;
    const rows = this.entries.filter((entry) => entry.at <= now).slice(-MAX_ROWS).reverse();
    const shown = `${rows.length} ${rows.length ? rows[0].at : 0} ${this.entries.length} ${start > 1e8}`;
    if (shown === this.shown) return;
    this.shown = shown;
    while (this.list.children.length < rows.length) this.list.append(makeRow());
    while (this.list.children.length > rows.length) this.list.lastChild.remove();
    rows.forEach((row, i) => {
      const element = this.list.children[i];
      element.dataset.kind = row.kind;
      const [time, kind, what] = element.children;
      time.textContent = start > 1e8 ? new Date(1000 * row.at).toLocaleTimeString([], { hour12: false }) : `${row.at.toFixed(2)} s`;
      kind.textContent = row.kind;
      what.textContent = what.title = row.text;
    });
  }
}

function makeRow() {
  const element = document.createElement("li");
  element.className = "event";
  element.append(document.createElement("time"), document.createElement("span"), document.createElement("span"));
  element.children[1].className = "kind";
  element.children[2].className = "what";
  return element;
}

function describe(event, state) {
  const name = state.name(event.key) || "a request";
  if (event.kind === "evicted") return event.count === 1 ? "1 cached block lost its content" : `${event.count} cached blocks lost their content`;
  if (event.kind === "preempted") return event.count === 1 ? `${name} lost its blocks` : `${name} lost its blocks again (${event.count}×)`;
  return `${name} found ${event.count} cached tokens`;
}
