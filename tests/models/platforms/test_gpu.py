"""XLA's options on a GPU, and the GPU's memory."""

from models.platforms.gpu import GPU, SHARE_VARIABLE


def test_loops_and_products_go_into_graphs_whatever_the_weights_are():
    for dtypes in (["float32"], ["bfloat16"]):
        commands = GPU().compiler_options(dtypes)["xla_gpu_enable_command_buffer"]
        assert {"WHILE", "CUBLAS", "CUSTOM_CALL"} <= set(commands.split(","))


def test_jax_takes_three_quarters_of_the_memory_by_default(monkeypatch):
    monkeypatch.delenv(SHARE_VARIABLE, raising=False)
    assert GPU().total_memory_bytes(75) == 100
    monkeypatch.setenv(SHARE_VARIABLE, "0.5")
    assert GPU().total_memory_bytes(75) == 150
