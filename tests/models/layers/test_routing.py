"""Routers choose the experts that a few lines of NumPy choose, and weigh them alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.routing import CorrectedRouter, Router, SigmoidTopK, SoftmaxTopK
from models.layers.routing_rules import GroupedSoftmaxTopK, PairGroupedSoftmaxTopK
from tests import on_device


def random_scores(num_rows: int, num_experts: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(num_rows, num_experts)).astype(np.float32)


def of_largest(values_np: np.ndarray, count: int) -> np.ndarray:
    """The places of the largest numbers of each row, the largest first."""
    return np.argsort(-values_np, axis=-1)[:, :count]


def chosen(choose, *arrays):
    """The choice, in one program."""
    return jax.jit(lambda *arrays: choose(*arrays))(*arrays)


def check(routing, expert_ids_np, weights_np):
    np.testing.assert_array_equal(routing.expert_ids, expert_ids_np)
    np.testing.assert_allclose(routing.weights, weights_np, rtol=1e-5)


def test_softmax_by_hand():
    # Likelihoods 1/8, 1/2, 1/8 and 1/4.
    scores = jnp.log(on_device.array([[1.0, 4.0, 1.0, 2.0]]))
    check(chosen(SoftmaxTopK(top_k=2, normalizes=False), scores), [[1, 3]], [[1 / 2, 1 / 4]])
    check(chosen(SoftmaxTopK(top_k=2, normalizes=True), scores), [[1, 3]], [[2 / 3, 1 / 3]])


@pytest.mark.parametrize("normalizes", [False, True])
def test_softmax_of_many_rows(normalizes):
    scores_np = random_scores(20, 8)
    likely_np = np.exp(scores_np) / np.exp(scores_np).sum(axis=-1, keepdims=True)
    ids_np = of_largest(scores_np, 3)
    weights_np = np.take_along_axis(likely_np, ids_np, axis=-1)
    if normalizes:
        weights_np = weights_np / weights_np.sum(axis=-1, keepdims=True)
    check(chosen(SoftmaxTopK(top_k=3, normalizes=normalizes), scores_np), ids_np, weights_np)


def test_the_bias_of_a_sigmoid_changes_the_choice_and_not_the_weights():
    scores = on_device.array([[0.0, 2.0, 1.0]])
    choose = SigmoidTopK(top_k=1, normalizes=False)
    check(chosen(choose, scores, on_device.zeros(3)), [[1]], [[1 / (1 + np.exp(-2))]])
    # 0.5 + 0.4 is more than 0.88 and 0.73.
    check(chosen(choose, scores, on_device.array([0.4, 0.0, 0.0])), [[0]], [[0.5]])


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize(("num_groups", "num_kept_groups"), [(1, 1), (4, 2), (4, 4)])
def test_sigmoids_of_many_rows(normalizes, num_groups, num_kept_groups):
    scores_np = random_scores(20, 16)
    bias_np = np.random.default_rng(1).normal(size=16).astype(np.float32) / 4
    likely_np = 1 / (1 + np.exp(-scores_np))
    ranked_np = (likely_np + bias_np).reshape(20, num_groups, -1)
    of_groups_np = np.sort(ranked_np, axis=-1)[:, :, -2:].sum(axis=-1)
    is_kept_np = np.zeros((20, num_groups), bool)
    np.put_along_axis(is_kept_np, of_largest(of_groups_np, num_kept_groups), True, axis=-1)
    ranked_np = np.where(is_kept_np[:, :, None], ranked_np, -np.inf).reshape(20, 16)
    ids_np = of_largest(ranked_np, 3)
    weights_np = np.take_along_axis(likely_np, ids_np, axis=-1)
    if normalizes:
        weights_np = weights_np / weights_np.sum(axis=-1, keepdims=True)
    choose = SigmoidTopK(
        top_k=3,
        normalizes=normalizes,
        factor=2.5,
        num_groups=num_groups,
        num_kept_groups=num_kept_groups,
    )
    check(chosen(choose, scores_np, bias_np), ids_np, 2.5 * weights_np)


def test_a_group_is_as_good_as_its_two_best_experts():
    # The best expert is in the second group; the sum of two is larger in the first.
    scores = on_device.array([[1.0, 1.0, 2.0, -9.0]])
    choose = SigmoidTopK(top_k=1, num_groups=2, num_kept_groups=1)
    assert chosen(choose, scores, on_device.zeros(4)).expert_ids.tolist() == [[0]]


def test_the_best_expert_alone_decides_whether_a_softmax_chooses_its_group():
    # Likelihoods 6/16, 1/16 | 4/16, 5/16: the second group has the larger sum, the first the best.
    scores = jnp.log(on_device.array([[6.0, 1.0, 4.0, 5.0]]))
    choose = GroupedSoftmaxTopK(top_k=2, factor=2.0, num_groups=2, num_kept_groups=1)
    check(chosen(choose, scores), [[0, 1]], [[12 / 16, 2 / 16]])
    check(chosen(GroupedSoftmaxTopK(top_k=2), scores), [[0, 3]], [[6 / 16, 5 / 16]])


def test_the_two_best_experts_decide_whether_a_softmax_chooses_their_group():
    # Likelihoods 7, 1, 1 | 4, 5, 0.5 | 3, 3, 3 of 27.5. The sums of two are 8, 9 and 6.
    scores = jnp.log(on_device.array([[7.0, 1.0, 1.0, 4.0, 5.0, 0.5, 3.0, 3.0, 3.0]]))
    groups = {"num_groups": 3, "num_kept_groups": 1}
    plain = PairGroupedSoftmaxTopK(top_k=2, normalizes=False, factor=2.0, **groups)
    check(chosen(plain, scores), [[4, 3]], [[10 / 27.5, 8 / 27.5]])
    normed = PairGroupedSoftmaxTopK(top_k=2, normalizes=True, factor=2.0, **groups)
    check(chosen(normed, scores), [[4, 3]], [[10 / 9, 8 / 9]])
    check(
        chosen(PairGroupedSoftmaxTopK(top_k=2, normalizes=True), scores),
        [[0, 4]],
        [[7 / 12, 5 / 12]],
    )


def test_scores_of_a_router_are_not_rounded():
    router = Router(2, 2, dtype=jnp.bfloat16)
    # 1 + 1/512 has more bits than bfloat16.
    router.kernel[...] = on_device.array([[1.0, 0.0], [1 / 512, 1.0]], jnp.bfloat16)
    scores = router.scores(on_device.ones((1, 2), jnp.bfloat16))
    assert scores.dtype == jnp.float32
    assert scores.tolist() == [[1 + 1 / 512, 1.0]]


def test_the_correction_of_a_router_keeps_float32_in_a_bfloat16_model():
    router = CorrectedRouter(2, 2)
    # In bfloat16 both would be 8, and the first expert would be chosen.
    router.correction_bias[...] = on_device.array([8.0, 8.001])
    choose = SigmoidTopK(top_k=1, normalizes=False, factor=2.0)
    check(router.route(on_device.ones((1, 2), jnp.bfloat16), choose), [[1]], [[1.0]])
