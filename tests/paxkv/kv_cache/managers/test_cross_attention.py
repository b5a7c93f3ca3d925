"""Cross-attention: blocks for encoder tokens are allocated once, and are never hits."""

from paxkv.kv_cache.managers.cross_attention import CrossAttentionManager
from tests.paxkv.kv_cache.cache_fakes import (
    FakeRequest,
    admit,
    copies,
    cross,
    finish_step,
    fork,
    full,
    ids,
    make_group,
    make_manager,
    run_alone,
    state,
    table,
)


def test_blocks_for_encoder_tokens_are_allocated_once():
    manager = make_manager(full(), cross())
    request = FakeRequest("r", range(3))
    assert admit(manager, request, num_encoder_tokens=9)
    assert (table(manager, request, 0), table(manager, request, 1)) == ([1], [2, 3, 4])
    finish_step(request)
    request.all_token_ids += range(6)
    manager.allocate_slots(request, 6)
    assert (table(manager, request, 0), table(manager, request, 1)) == ([1, 5, 6], [2, 3, 4])
    manager.check_invariants()
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 19


def test_encoder_blocks_count_in_the_capacity_check():
    manager = make_manager(full(), cross(), num_blocks=5)
    before = state(manager)
    assert not admit(manager, FakeRequest("r", range(3)), num_encoder_tokens=13)
    assert state(manager) == before
    assert admit(manager, FakeRequest("r", range(3)), num_encoder_tokens=12)


def test_there_are_no_prefix_hits():
    # The decoder's K and V depend on the encoder's input, which hashes do not cover.
    manager = make_manager(full(), cross(), enable_caching=True)
    run_alone_with_encoder = FakeRequest("r", range(9))
    admit(manager, run_alone_with_encoder, num_encoder_tokens=4)
    finish_step(run_alone_with_encoder)
    assert not manager.enable_caching
    assert manager.get_computed_blocks(FakeRequest("s", range(9)))[1] == 0
    assert len(manager.block_pool.cached_block_hash_to_block) == 0
    assert manager.explain_miss(FakeRequest("s", range(9))).reason == "disabled"


def test_a_fork_shares_encoder_blocks_and_copies_decoder_blocks():
    manager = make_manager(full(), cross())
    source = FakeRequest("r", range(6))
    admit(manager, source, num_encoder_tokens=6)
    finish_step(source)
    forked = fork(manager, source, "s", 6)
    assert table(manager, forked, 1) == table(manager, source, 1) == [3, 4]
    assert table(manager, forked, 0) == [1, 5]
    assert copies(manager) == [(2, 5)]
    manager.free(source)
    manager.check_invariants()
    assert manager.block_pool.blocks[3].ref_cnt == 1


def test_a_fork_needs_no_room_for_encoder_tokens():
    manager = make_manager(full(), cross(), num_blocks=6)
    source = FakeRequest("r", range(6))
    admit(manager, source, num_encoder_tokens=6)
    finish_step(source)
    # One block is free, which the copy needs.
    assert fork(manager, source, "s", 6, num_encoder_tokens=6) is not None
    assert manager.usage == 1


def test_decode_steps_need_no_allocation():
    manager = make_group(CrossAttentionManager, cross())
    manager.allocate_new_blocks("r", 5, 5)
    assert manager.get_max_tokens_before_allocate("r") > 10**9
    manager.replace_shared_blocks("r", 3, 8)
    assert ids(manager.get_blocks("r")) == [1, 2]


def test_slots_after_the_last_encoder_token_are_unused():
    manager = make_manager(full(), cross(block_size=8))
    source = FakeRequest("r", range(6))
    admit(manager, source, num_encoder_tokens=9)
    finish_step(source)
    # 2 blocks of 4 hold 6 tokens, 2 of 8 hold 9.
    assert manager.count_slots([source]) == (24, 15)
    forked = fork(manager, source, "s", 6)
    # The fork has a copy of the second block: 7 tokens in two blocks, one of them shared.
    finish_step(forked)
    assert manager.count_slots([source, forked]) == (28, 18)


def test_a_reused_id_does_not_count_earlier_encoder_tokens():
    manager = make_manager(full(), cross())
    first, source = FakeRequest("s", range(4)), FakeRequest("r", range(4))
    for request, num_encoder_tokens in ((first, 5), (source, 8)):
        admit(manager, request, num_encoder_tokens=num_encoder_tokens)
        finish_step(request)
    manager.free(first)
    forked = fork(manager, source, "s", 4)
    # The fork's own block is still empty; all other blocks are full.
    assert manager.count_slots([source, forked]) == (16, 12)


def test_free_removes_all_records_of_a_request():
    manager = make_manager(full(), cross())
    assert run_alone(manager, "r", range(5)).num_computed_tokens == 5
    manager.free(FakeRequest("r", ()))
    assert manager.usage == 0
    assert manager.count_slots([FakeRequest("r", ())]) == (0, 0)


def test_slots_are_reserved_only_for_decoder_tokens():
    manager = make_manager(full(), cross())
    request = FakeRequest("r", range(4))
    manager.allocate_slots(request, 4, num_encoder_tokens=9)
    finish_step(request)
    assert manager.get_num_blocks_to_reserve(request, 9) == 2
    assert [len(group) for group in manager.reserve_slots(request, 9).blocks] == [2, 0]
    assert len(table(manager, request, group=1)) == 3
