// The prefix tree: each cached block is a child of the block before it. A chain is one row.

const MAX_ROWS = 120;
const SLICE = 4000; // blocks per slice

// Builds the tree. Yields after each slice, so that the page keeps drawing; returns the roots.
export function* buildTree(state) {
  const nodes = new Map();
  const { hash, parent, depth, hits, n } = state;
  let numUnknown = 0;
  for (let id = 1; id < n; id++) {
    if (id % SLICE === 0) yield null;
    if (hash[id] === 0) continue;
    if (depth[id] === 0) { numUnknown++; continue; }
    const known = nodes.get(hash[id]);
    if (known) { known.ids.push(id); known.hits += hits[id]; continue; }
    nodes.set(hash[id], { hash: hash[id], parent: parent[id], depth: depth[id], ids: [id], hits: hits[id],
      children: null, parentNode: null, size: 1 });
  }
  const roots = [];
  let i = 0;
  for (const node of nodes.values()) {
    if (++i % SLICE === 0) yield null;
    // If the block before it was evicted, the node becomes a root.
    const above = node.depth > 1 ? nodes.get(node.parent) : undefined;
    if (above) { node.parentNode = above; (above.children ||= []).push(node); } else roots.push(node);
  }
  const byDepth = [...nodes.values()].sort((a, b) => b.depth - a.depth);
  for (const node of byDepth) {
    if (++i % SLICE === 0) yield null;
    if (node.parentNode) node.parentNode.size += node.size;
  }
  roots.sort(larger);
  return { roots, numNodes: nodes.size, numUnknown };
}

const larger = (a, b) => b.hits - a.hits || b.size - a.size;

export class PrefixTree {
  constructor(list, note, onMark) {
    this.list = list; this.note = note; this.onMark = onMark;
    this.open = new Set();
    this.tree = null;
    this.rows = [];
  }

  draw(tree) {
    this.tree = tree;
    const rows = [];
    for (const root of tree.roots) {
      if (rows.length >= MAX_ROWS) break;
      this.collect(root, 0, rows);
    }
    const most = rows.reduce((size, row) => Math.max(size, row.end.size, row.chain), 1);
    while (this.rows.length < rows.length) this.rows.push(this.makeRow());
    while (this.rows.length > rows.length) this.rows.pop().element.remove();
    rows.forEach((row, i) => this.fill(this.rows[i], row, most));
    const unknown = tree.numUnknown ? ` · ${tree.numUnknown} cached before this page was opened` : "";
    const text = tree.numNodes ? `${tree.numNodes} blocks, ${tree.roots.length} roots${unknown}` : unknown.slice(3);
    if (this.note.textContent !== text) this.note.textContent = text;
    return rows.length;
  }

  // A chain without branches is one row, from `node` to `end`.
  collect(node, level, rows) {
    if (rows.length >= MAX_ROWS) return;
    const chain = [node];
    let end = node;
    // End the row where the number of hits changes: fewer requests share the rest of the chain.
    while (end.children && end.children.length === 1 && end.children[0].hits === end.hits) {
      end = end.children[0];
      chain.push(end);
    }
    rows.push({ node, end, level, chain: chain.length, nodes: chain });
    if (!end.children || !this.isOpen(end, level)) return;
    end.children.sort(larger);
    for (const child of end.children) this.collect(child, level + 1, rows);
  }

  isOpen(end, level) {
    return level < 2 ? !this.open.has(-end.hash) : this.open.has(end.hash);
  }

  toggle(row) {
    const { end, level } = row;
    const mark = level < 2 ? -end.hash : end.hash;
    if (this.open.has(mark)) this.open.delete(mark); else this.open.add(mark);
    this.draw(this.tree);
  }

  makeRow() {
    const element = document.createElement("li");
    element.className = "node";
    const label = document.createElement("span");
    label.className = "label";
    const button = document.createElement("button");
    const leaf = document.createElement("span");
    leaf.className = "leaf";
    leaf.textContent = "·";
    const text = document.createElement("span");
    label.append(button, leaf, text);
    const bar = document.createElement("span");
    bar.className = "bar";
    const fill = document.createElement("i");
    bar.append(fill);
    const hits = document.createElement("span");
    hits.className = "hits";
    element.append(label, bar, hits);
    const made = { element, button, leaf, text, fill, hits, row: null };
    button.addEventListener("click", () => this.toggle(made.row));
    const mark = () => this.onMark(made.row.nodes.flatMap((node) => node.ids));
    element.addEventListener("pointerenter", mark);
    element.addEventListener("pointerleave", () => this.onMark(null));
    button.addEventListener("focus", mark);
    button.addEventListener("blur", () => this.onMark(null));
    this.list.append(element);
    return made;
  }

  fill(made, row, most) {
    made.row = row;
    const { node, end, level, chain } = row;
    made.element.style.paddingLeft = `${0.35 + Math.min(level, 8) * 1.1}rem`;
    const hasChildren = Boolean(end.children);
    made.button.hidden = !hasChildren;
    made.leaf.hidden = hasChildren;
    if (hasChildren) {
      const isOpen = this.isOpen(end, level);
      set(made.button, isOpen ? "▾" : "▸");
      made.button.setAttribute("aria-expanded", String(isOpen));
      made.button.setAttribute("aria-label", `${end.children.length} continuations`);
    }
    const from = node.depth, to = end.depth;
    const below = end.size - 1;
    set(made.text, (from === to ? `block ${from}` : `blocks ${from}–${to}`) + (below ? ` · ${below} below` : ""));
    made.fill.style.width = `${Math.max((100 * (chain + below)) / most, 2)}%`;
    set(made.hits, node.hits === 1 ? "1 hit" : `${node.hits} hits`);
  }
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
