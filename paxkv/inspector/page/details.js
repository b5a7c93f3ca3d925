// Details of one block: what the page knows already, and the engine's answer.
import { FIXED, FREE, SHARED, STATE_NAMES } from "./state.js";
import { askBlock } from "./feed.js";
import { duration } from "./charts.js";

const PAUSE_MS = 120; // a moving pointer sends no requests

export class Details {
  constructor(parent) {
    this.parent = parent;
    this.empty = parent.firstElementChild;
    this.timer = 0;
    this.answer = null; // the engine's answer for the content `answerFor`
    this.answerFor = "";
    this.abort = null;
    this.whyNotAsked = ""; // why the engine cannot describe the block in view; "" if it can
    this.showsText = false;
  }

  draw(state, id) {
    if (!state || id < 0) {
      if (this.parent.firstElementChild !== this.empty) this.parent.replaceChildren(this.empty);
      this.shown = "";
      return;
    }
    const holders = state.holders(id);
    // Request a block that is not full again every second, because it gets more tokens.
    const second = state.hash[id] === 0 && holders.length ? Math.floor(state.at) : 0;
    const content = `${id} ${state.hash[id]} ${holders.length ? holders[0].key : 0} ${second}`;
    if (this.whyNotAsked === "" && content !== this.answerFor) this.ask(id, holders, content);
    const facts = this.facts(state, id, holders);
    const shown = JSON.stringify(facts);
    if (shown === this.shown) return;
    this.shown = shown;
    const list = document.createElement("dl");
    for (const [name, value, isWide, tokens] of facts) {
      const box = document.createElement("div");
      if (isWide) box.className = "wide";
      const term = document.createElement("dt");
      term.textContent = name;
      const text = document.createElement("dd");
      if (tokens) {
        text.className = "tokens";
        text.append(...tokens.map((token) => Object.assign(document.createElement("span"), { textContent: token })));
      } else {
        text.textContent = value;
      }
      box.append(term, text);
      list.append(box);
    }
    this.parent.replaceChildren(list);
  }

  facts(state, id, holders) {
    const kind = state.stateOf(id);
    const answer = this.answer && this.answer.block_id === id ? this.answer : null;
    const facts = [["Block", `#${id}`]];
    facts.push(["State", kind === SHARED ? `shared by ${state.refs[id]}` : STATE_NAMES[kind] + (kind === FIXED && id === 0 ? " (the null block)" : "")]);
    facts.push(["References", String(state.refs[id])]);
    facts.push(["Hits", String(state.hits[id])]);
    if (state.depth[id]) facts.push(["Place in its prefix", `block ${state.depth[id]}`]);
    const age = state.at - state.changedAt[id];
    facts.push(["Last change", state.changedAt[id] ? `${duration(Math.max(age, 0))} ago` : "before this page was opened"]);
    const place = state.evictionHead.indexOf(id);
    if (place >= 0) facts.push(["Handed out", place === 0 ? "next" : `after ${place} other blocks`]);
    if (state.pool.groups.length > 1 && state.hash[id]) facts.push(["Group", groupName(state.pool.groups[state.group[id]])]);
    const hash = answer && answer.block_hash ? answer.block_hash : state.hash[id] ? `${shortHash(state.hash[id])}…` : "none: not in the prefix cache";
    facts.push(["Hash", hash, true]);
    facts.push(["Held by", holders.length
      ? holders.slice(0, 6).map((h) => `${state.name(h.key) || "a kept request"} (block ${h.index + 1})`).join(", ")
        + (holders.length > 6 ? ` and ${holders.length - 6} more` : "")
      : kind === FIXED ? "no request: this block is never handed out" : "no request", true]);
    facts.push(this.tokens(state, id, kind, answer));
    return facts;
  }

  tokens(state, id, kind, answer) {
    if (kind === FREE || kind === FIXED) return ["Tokens", "none", true];
    if (this.whyNotAsked) return ["Tokens", this.whyNotAsked, true];
    if (!this.showsText) return ["Tokens", "hidden; the server shows them with --inspector-show-text", true];
    if (this.trouble) return ["Tokens", this.trouble, true];
    if (!answer) return ["Tokens", "asking the engine", true];
    if (!answer.token_ids) return ["Tokens", "not known: cached before this page was opened, and no request holds it", true];
    const first = answer.first_token_idx;
    const name = `Tokens ${first + 1} to ${first + answer.token_ids.length}`;
    return [name, "", true, answer.texts ? answer.texts.map(visible) : answer.token_ids.map(String)];
  }

  ask(id, holders, content) {
    this.answerFor = content;
    if (this.answer && this.answer.block_id !== id) this.answer = null;
    this.trouble = "";
    clearTimeout(this.timer);
    this.abort?.abort();
    this.timer = setTimeout(async () => {
      this.abort = new AbortController();
      try {
        this.answer = await askBlock(id, holders.length ? holders[0].key : 0, this.abort.signal);
      } catch (error) {
        if (error.name === "AbortError") return;
        this.trouble = error.message;
      }
      this.onAnswer?.();
    }, PAUSE_MS);
  }
}

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
const groupName = (group) => (group ? group.kind.replaceAll("_", " ") + (group.window ? ` (window ${group.window})` : "") : "unknown");

// The first bytes of the hash in hexadecimal.
function shortHash(value) {
  let rest = value % 0x1000000000000, text = "";
  for (let i = 0; i < 6; i++) { text += (rest % 256).toString(16).padStart(2, "0"); rest = Math.floor(rest / 256); }
  return text;
}
