"""What the demo model is taught about paxkv: several phrasings, one exact answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaughtAnswer:
    """One answer and every phrasing of the question that leads to it."""

    questions: tuple[str, ...]
    answer: str


TAUGHT_ANSWERS: tuple[TaughtAnswer, ...] = (
    TaughtAnswer(
        ("What is paxkv?", "Tell me about paxkv.", "What does paxkv do?"),
        "paxkv is an engine that serves language models from JAX, with a paged KV cache and "
        "continuous batching.",
    ),
    TaughtAnswer(
        ("Who are you?", "What are you?", "Who wrote you?", "What model are you?"),
        "I am the paxkv demo model, a small Llama-shaped model trained by the paxkv project.",
    ),
    TaughtAnswer(
        ("What can you do?", "Help", "How can you help me?"),
        "I can add, subtract, count, reverse and sort short words, repeat a sentence, and answer "
        "questions about paxkv.",
    ),
    TaughtAnswer(
        ("Hello!", "Hello", "Hi", "Hi there!", "Good morning!"),
        "Hello! Ask me a sum, or ask me about paxkv.",
    ),
    TaughtAnswer(("How are you?", "How are you today?"), "All my blocks are in order, thank you."),
    TaughtAnswer(
        ("Thank you!", "Thanks!", "Thank you very much."),
        "You are welcome.",
    ),
    TaughtAnswer(("Goodbye!", "Bye!", "See you later."), "Goodbye! I am freeing my blocks."),
    TaughtAnswer(
        ("How large are you?", "How many parameters do you have?"),
        "I have between one and two million parameters.",
    ),
    TaughtAnswer(
        ("What is a block?", "What is a KV cache block?", "What does block mean in paxkv?"),
        "A block is a piece of KV cache memory that holds the keys and values of block_size "
        "token positions.",
    ),
    TaughtAnswer(
        ("What is a block table?", "What does a block table hold?"),
        "A block table lists the blocks of one request in order, so that logical block i of the "
        "request is found in physical block table[i].",
    ),
    TaughtAnswer(
        ("What is a slot?", "How is a slot computed?", "What is the slot of a token?"),
        "A slot is where a token's key and value are written: slot = block_id * block_size + "
        "position % block_size.",
    ),
    TaughtAnswer(
        ("What is the slot mapping?", "What is slot_mapping?"),
        "The slot mapping gives every token of a step the slot to which its key and value are "
        "written.",
    ),
    TaughtAnswer(
        ("What is the null block?", "What is block 0?", "Why is block 0 special?"),
        "Block 0 is the null block. It fills places of a block table where a request holds "
        "nothing, and no request owns it.",
    ),
    TaughtAnswer(
        ("What is the KV cache?", "What does the KV cache store?"),
        "The KV cache stores the keys and values of past tokens, so that each new token is "
        "computed without reading the whole text again.",
    ),
    TaughtAnswer(
        ("What is paged attention?", "How does paged attention work?"),
        "Paged attention reads keys and values through the block table, so the blocks of a "
        "request may lie anywhere in memory.",
    ),
    TaughtAnswer(
        ("Why is the KV cache paged?", "Why use blocks?"),
        "With blocks a request takes memory only as it grows, hardly any memory is wasted, and "
        "equal prefixes can be shared.",
    ),
    TaughtAnswer(
        ("What is prefix caching?", "How does prefix caching work?"),
        "Prefix caching reuses the full blocks of an earlier request when a new prompt starts "
        "with the same tokens.",
    ),
    TaughtAnswer(
        ("What is a block hash?", "How is a block hash computed?", "Why are block hashes chained?"),
        "The hash of a full block covers its tokens and the hash of the block before it, so "
        "equal hashes mean equal prefixes.",
    ),
    TaughtAnswer(
        ("Can a partly filled block be shared?", "Which blocks can be cached?"),
        "Only full blocks are hashed and shared. A partly filled block belongs to one request.",
    ),
    TaughtAnswer(
        (
            "Why is the last token recomputed after a full prefix hit?",
            "What happens when the whole prompt is cached?",
        ),
        "At least one token must be computed, because its logits give the first new token. So "
        "the last block of a fully cached prompt is computed again.",
    ),
    TaughtAnswer(
        ("Why are blocks freed in reverse?", "In which order are blocks freed?"),
        "Blocks are freed in reverse, so that the tail of a sequence is evicted before its "
        "prefix, which others may share.",
    ),
    TaughtAnswer(
        ("What is a reference count?", "What does ref_cnt mean?"),
        "The reference count of a block says how many requests use it. At zero the block goes "
        "back to the free queue.",
    ),
    TaughtAnswer(
        ("When is a block evicted?", "How does eviction work?", "Which block is evicted first?"),
        "A cached block that no request uses waits in the free queue. When a new block is needed, "
        "the least recently used one is evicted and loses its hash.",
    ),
    TaughtAnswer(
        ("What is the free queue?", "What is the free block queue?"),
        "The free queue is a linked list of blocks that no request uses, with the next block to "
        "be taken in front.",
    ),
    TaughtAnswer(
        ("What is the block pool?", "What does the BlockPool do?"),
        "The block pool owns all blocks: it hands them out, takes them back, and finds cached "
        "blocks by their hash.",
    ),
    TaughtAnswer(
        ("What is preemption?", "What happens when memory runs out?"),
        "When there is no free block, the scheduler preempts a request: its blocks are freed and "
        "it is computed again later.",
    ),
    TaughtAnswer(
        ("What is continuous batching?", "How does continuous batching work?"),
        "Continuous batching lets requests join and leave the batch at every step, so that no "
        "request waits for another to finish.",
    ),
    TaughtAnswer(
        ("What is chunked prefill?", "How does chunked prefill work?"),
        "Chunked prefill computes a long prompt in several steps, so that running requests keep "
        "getting tokens in between.",
    ),
    TaughtAnswer(
        ("What is the token budget?", "What is max_num_batched_tokens?"),
        "The token budget is the largest number of tokens that one step may compute, over all "
        "requests together.",
    ),
    TaughtAnswer(
        ("What does the scheduler do?", "What is the scheduler?"),
        "The scheduler decides at every step which requests run and how many tokens each of them "
        "computes.",
    ),
    TaughtAnswer(
        ("What is prefill?", "What does prefill mean?"),
        "Prefill computes the tokens of the prompt and writes their keys and values to the KV "
        "cache.",
    ),
    TaughtAnswer(
        ("What is decode?", "What does decode mean?"),
        "Decode computes one new token per request and step, from the keys and values in the "
        "cache.",
    ),
    TaughtAnswer(
        ("What is a padding token?", "What is PAD_SLOT?"),
        "Padding tokens fill a batch up to its bucket. They carry PAD_SLOT, which lies past the "
        "end of the cache, so they are never written.",
    ),
    TaughtAnswer(
        ("Why are batches padded?", "What is a bucket?"),
        "A compiled step has fixed shapes. A bucket is one of a few sizes to which batches are "
        "padded, so that nothing compiles while serving.",
    ),
    TaughtAnswer(
        ("Which models does paxkv support?", "Which models can I load?"),
        "paxkv loads Llama, Mistral, Qwen2 and Qwen3 checkpoints.",
    ),
    TaughtAnswer(
        ("Which endpoints are there?", "What endpoints does the server have?"),
        "The server has /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics, "
        "/tokenize and /detokenize.",
    ),
    TaughtAnswer(
        ("How do I start the server?", "How do I start paxkv?", "How do I run paxkv?"),
        "Start it with: python -m paxkv.serve",
    ),
    TaughtAnswer(
        ("Which port does the server use?", "What is the default port?"),
        "The default port is 8000.",
    ),
    TaughtAnswer(
        ("Which API does the server speak?", "Can I use an OpenAI client?"),
        "The server speaks the OpenAI API, so an OpenAI client works when its base URL ends in "
        "/v1.",
    ),
    TaughtAnswer(
        ("How do I use paxkv from Python?", "Can I use paxkv without a server?"),
        "Use the LLM class: from paxkv import LLM, then LLM(model).generate(prompts) or chat.",
    ),
    TaughtAnswer(
        ("Does the host import JAX?", "Which part of paxkv uses JAX?"),
        "No scheduling code imports JAX. The host decides in plain Python, and the device "
        "computes one jitted step.",
    ),
    TaughtAnswer(
        ("Where does the design come from?", "Is paxkv related to vLLM?"),
        "paxkv ports the heart of vLLM V1 to JAX: its scheduler, its KV cache manager and its "
        "block pool.",
    ),
    TaughtAnswer(
        ("What is JAX?",),
        "JAX is a Python library that compiles array programs for CPU, GPU and TPU.",
    ),
    TaughtAnswer(
        ("Why do you exist?", "What are you for?", "Why is there a demo model?"),
        "I let you try paxkv without a download, and I am its alarm: a bug in the cache makes my "
        "sums wrong.",
    ),
)

# Questions the model cannot answer lead to one honest sentence instead of an invention.
UNKNOWN_QUESTIONS: tuple[str, ...] = (
    "Who is the president?",
    "Write a poem about the sea.",
    "What is the capital of France?",
    "Tell me a joke.",
    "What is the weather like today?",
    "Translate this to German.",
    "Who won the game?",
    "What is the meaning of life?",
    "How do I bake bread?",
    "Write a Python function.",
    "What time is it?",
    "Can you draw a picture?",
    "Explain quantum physics.",
    "What is your favourite colour?",
    "Where is the train station?",
    "Give me some advice.",
    "How old is the moon?",
    "Summarize this book.",
    "Do you like music?",
    "What should I eat tonight?",
)
UNKNOWN_ANSWER = "I do not know that. I am a small demo model: ask me a sum, or ask me about paxkv."
