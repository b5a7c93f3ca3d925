// The pool and its requests at one moment. Decodes frames and applies them.

export const RUNNING_WIDTH = 5;
export const WAITING_WIDTH = 4;
const TABLE_WIDTH = 5;
const HASH_BYTES = 6;
export const STATUS = ["waiting", "grammar", "loading", "for a fork", "running", "preempted"];
export const FREE = 0, CACHED = 1, USED = 2, SHARED = 3, FIXED = 4;
export const STATE_NAMES = ["free", "cached, evictable", "in use", "shared", "never handed out"];

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

// Assumes a little-endian machine, as all machines with browsers are.
const u16 = (text) => new Uint16Array(bytesOf(text).buffer);
const u32 = (text) => new Uint32Array(bytesOf(text).buffer);

// A number holds six bytes exactly. Adding the group distinguishes equal contents of two groups.
function hashes(text, groups) {
  const bytes = bytesOf(text);
  const out = new Float64Array(bytes.length / HASH_BYTES);
  for (let i = 0, j = 0; i < out.length; i++, j += HASH_BYTES) {
    const low = bytes[j] | (bytes[j + 1] << 8) | (bytes[j + 2] << 16);
    const high = bytes[j + 3] | (bytes[j + 4] << 8) | (bytes[j + 5] << 16);
    const value = low + high * 0x1000000;
    out[i] = value === 0 ? 0 : value + (groups[i] % 32) * 0x1000000000000;
  }
  return out;
}

function tableChanges({ rows, new_block_ids }) {
  const ids = u32(new_block_ids);
  const changes = [];
  for (let i = 0, start = 0; i < rows.length; i += TABLE_WIDTH) {
    const [key, group, skipped, kept, numNew] = rows.slice(i, i + TABLE_WIDTH);
    changes.push({ key, group, skipped, kept, added: ids.subarray(start, start + numNew) });
    start += numNew;
  }
  return changes;
}

// Converts the columns of a JSON frame to typed arrays.
export function decodeFrame(frame) {
  const blocks = frame.blocks;
  const groups = bytesOf(blocks.groups);
  return {
    ...frame,
    blocks: {
      ids: blocks.block_ids === null ? null : u32(blocks.block_ids),
      refs: u16(blocks.ref_counts),
      hash: hashes(blocks.hashes, groups),
      parent: hashes(blocks.parents, groups),
      depth: u16(blocks.depths),
      group: groups,
      hits: u16(blocks.num_hits),
    },
    tables: tableChanges(frame.tables),
  };
}

export class PoolState {
  constructor(pool) {
    const n = pool.num_blocks;
    this.pool = pool;
    this.n = n;
    this.at = 0;
    this.refs = new Uint16Array(n);
    this.hash = new Float64Array(n);
    this.parent = new Float64Array(n);
    this.depth = new Uint16Array(n);
    this.group = new Uint8Array(n);
    this.hits = new Uint16Array(n);
    this.changedAt = new Float64Array(n);
    this.evictedAt = new Float64Array(n).fill(-1e9);
    this.owner = new Uint32Array(n);
    this.fixed = new Set([0, ...pool.permanent_block_ids]);
    this.tables = new Map(); // key -> per group {ids, skipped}
    this.requests = new Map(); // key -> info
    this.running = []; this.waiting = []; this.numWaiting = 0;
    this.evictionHead = []; this.numFree = 0; this.counters = null;
  }

  clone() {
    const copy = Object.create(PoolState.prototype);
    Object.assign(copy, this);
    for (const name of ["refs", "hash", "parent", "depth", "group", "hits", "changedAt", "evictedAt", "owner"]) {
      copy[name] = this[name].slice();
    }
    // A copy may share tables and infos, because they are never changed in place.
    copy.tables = new Map(this.tables);
    copy.requests = new Map(this.requests);
    return copy;
  }

  // Returns events for the log: {kind, key, count}.
  apply(frame) {
    const isSnapshot = frame.pool !== null;
    const events = [];
    this.at = frame.at_s;
    const numEvicted = this.applyBlocks(frame.blocks, isSnapshot);
    if (numEvicted && !isSnapshot) events.push({ kind: "evicted", key: 0, count: numEvicted });
    for (const info of frame.new_requests) {
      this.requests.set(info.key, { ...info, numPreemptions: 0, isKnown: false });
    }
    this.applyTables(frame.tables);
    this.applyRunning(frame.running, isSnapshot, events);
    this.applyWaiting(frame.waiting, isSnapshot, events);
    for (const key of frame.gone_keys) {
      this.requests.delete(key);
      this.tables.delete(key);
    }
    this.numWaiting = frame.num_waiting;
    this.evictionHead = frame.eviction_head;
    this.numFree = frame.num_free_blocks;
    this.counters = frame.counters;
    return events;
  }

  applyBlocks(blocks, isSnapshot) {
    let numEvicted = 0;
    for (let i = 0; i < blocks.refs.length; i++) {
      const id = blocks.ids === null ? i : blocks.ids[i];
      if (this.hash[id] !== 0 && this.hash[id] !== blocks.hash[i]) {
        this.evictedAt[id] = this.at;
        numEvicted++;
      }
      this.refs[id] = blocks.refs[i];
      this.hash[id] = blocks.hash[i];
      this.parent[id] = blocks.parent[i];
      this.depth[id] = blocks.depth[i];
      this.group[id] = blocks.group[i];
      this.hits[id] = blocks.hits[i];
      if (!isSnapshot) this.changedAt[id] = this.at;
    }
    return numEvicted;
  }

  applyTables(changes) {
    let hasOrphans = false;
    for (const change of changes) {
      const { group, skipped, kept, added } = change;
      const groups = (this.tables.get(change.key) || []).slice();
      const old = groups[group] || { ids: new Uint32Array(0), skipped: 0 };
      const numOld = Math.max(Math.min(kept, old.ids.length), 0);
      const ids = new Uint32Array(kept + added.length);
      if (numOld > skipped) ids.set(old.ids.subarray(skipped, numOld), skipped);
      ids.set(added, kept);
      for (let i = 0; i < old.ids.length; i++) {
        const id = old.ids[i];
        if ((i < skipped || i >= kept) && this.owner[id] === change.key) {
          this.owner[id] = 0;
          hasOrphans ||= this.refs[id] > 0;
        }
      }
      for (const id of added) this.owner[id] = change.key;
      groups[group] = { ids, skipped };
      this.tables.set(change.key, groups);
    }
    if (hasOrphans) this.adoptOrphans();
  }

  // Gives blocks whose owner released them, but that other requests hold, a new owner.
  adoptOrphans() {
    for (const [key, groups] of this.tables) {
      for (const table of groups) {
        if (!table) continue;
        for (const id of table.ids) if (id !== 0 && this.owner[id] === 0) this.owner[id] = key;
      }
    }
  }

  applyRunning(rows, isSnapshot, events) {
    this.running = [];
    for (let i = 0; i < rows.length; i += RUNNING_WIDTH) {
      const [key, numTokens, numComputed, numCached, numPreemptions] = rows.slice(i, i + RUNNING_WIDTH);
      const info = this.requests.get(key);
      if (!isSnapshot && info && !info.isKnown && numCached > 0) {
        events.push({ kind: "prefix hit", key, count: numCached });
      }
      this.updateRequest(key, { isKnown: true, numPreemptions }, isSnapshot, events);
      this.running.push({ key, numTokens, numComputed, numCached, numPreemptions });
    }
  }

  applyWaiting(rows, isSnapshot, events) {
    this.waiting = [];
    for (let i = 0; i < rows.length; i += WAITING_WIDTH) {
      const [key, numTokens, status, numPreemptions] = rows.slice(i, i + WAITING_WIDTH);
      this.updateRequest(key, { numPreemptions }, isSnapshot, events);
      this.waiting.push({ key, numTokens, status, numPreemptions });
    }
  }

  updateRequest(key, fields, isSnapshot, events) {
    const info = this.requests.get(key);
    if (!info) return;
    if (!isSnapshot && fields.numPreemptions > info.numPreemptions) {
      events.push({ kind: "preempted", key, count: fields.numPreemptions });
    }
    if (info.isKnown && info.numPreemptions === fields.numPreemptions) return;
    this.requests.set(key, { ...info, ...fields });
  }

  stateOf(id) {
    if (this.fixed.has(id)) return FIXED;
    const refs = this.refs[id];
    if (refs === 0) return this.hash[id] === 0 ? FREE : CACHED;
    return refs === 1 ? USED : SHARED;
  }

  counts() {
    const counts = [0, 0, 0, 0, 0];
    for (let id = 0; id < this.n; id++) {
      const refs = this.refs[id];
      counts[refs === 0 ? (this.hash[id] === 0 ? FREE : CACHED) : refs === 1 ? USED : SHARED]++;
    }
    for (const id of this.fixed) { // counted under another state above
      const refs = this.refs[id];
      counts[refs === 0 ? (this.hash[id] === 0 ? FREE : CACHED) : refs === 1 ? USED : SHARED]--;
      counts[FIXED]++;
    }
    return counts;
  }

  name(key) {
    const info = this.requests.get(key);
    return info ? info.request_id : "";
  }

  // Returns the requests that hold a block, with its index in their tables.
  holders(id) {
    const found = [];
    if (id === 0) return found;
    for (const [key, groups] of this.tables) {
      groups.forEach((table, group) => {
        const index = table ? table.ids.indexOf(id) : -1;
        if (index >= 0) found.push({ key, group, index });
      });
    }
    return found;
  }
}
