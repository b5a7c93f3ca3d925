"""SlowPool: the rules of the block pool, written with lists and dicts, each in O(n)."""


class SlowPool:
    """Reference counts, the order in which free blocks are allocated, and the cached blocks.

    `free` holds the ids of blocks without references; the first is allocated next. `cached` holds
    (key, block id) pairs in the order in which they were cached: a lookup takes the first match.
    A key stands for a block's content; here it is the content itself.
    """

    NULL = 0

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.free = list(range(1, num_blocks))
        self.refs = dict.fromkeys(range(num_blocks), 0)
        self.cached = []

    def get_new(self, num_blocks):
        """The first free blocks; they leave the cache now, not when they were freed."""
        assert num_blocks <= len(self.free), "more blocks than are free"
        taken = self.free[:num_blocks]
        self.free = self.free[num_blocks:]
        for block_id in taken:
            self.forget(block_id)
            self.refs[block_id] = 1
        return taken

    def take(self, block_ids):
        """Allocates these free blocks."""
        assert all(self.refs[block_id] == 0 for block_id in block_ids)
        for block_id in block_ids:
            self.free.remove(block_id)
            self.forget(block_id)
            self.refs[block_id] = 1

    def touch(self, block_ids):
        for block_id in block_ids:
            if block_id == self.NULL:
                continue
            if self.refs[block_id] == 0:
                self.free.remove(block_id)
            self.refs[block_id] += 1

    def release_blocks(self, block_ids):
        """Removes a reference from each block; those left with none are appended to `free`."""
        freed = []
        for block_id in block_ids:
            if block_id == self.NULL:
                continue
            assert self.refs[block_id] > 0, "the block has no holder"
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                freed.append(block_id)
        self.free += freed

    def cache(self, block_id, key):
        assert block_id != self.NULL
        assert self.key_of(block_id) is None
        self.cached.append((key, block_id))

    def find(self, key):
        """The block that was cached first under `key`, or None."""
        for cached_key, block_id in self.cached:
            if cached_key == key:
                return block_id
        return None

    def key_of(self, block_id):
        for key, cached_id in self.cached:
            if cached_id == block_id:
                return key
        return None

    def forget(self, block_id):
        self.cached = [entry for entry in self.cached if entry[1] != block_id]

    def reset(self, num_permanent=0):
        """Empties the cache if only permanent blocks have references; returns whether it did."""
        if sum(self.refs.values()) > num_permanent:
            return False
        self.cached = []
        return True
