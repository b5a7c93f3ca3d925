"""Seeded system prompts of many lengths, so that prefix caching has something to share."""

from random import Random

SHORT_PROMPTS: tuple[str, ...] = (
    "You are a helpful assistant.",
    "You are the paxkv demo model.",
    "Answer briefly.",
    "You are a calculator.",
    "Be polite and exact.",
    "You are a helpful assistant. Answer in one line.",
    "You are an assistant that helps with sums and words.",
    "Answer the question of the user.",
)

_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivan", "Judy", "Kim", "Leo")
_PLACES = ("library", "school", "workshop", "office", "museum", "garden", "bakery", "harbour")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_TOPICS = ("sums", "words", "letters", "numbers", "blocks", "caches", "schedules", "tokens")
_STYLES = ("short", "exact", "friendly", "calm", "plain", "careful", "honest", "clear")

_SENTENCES: tuple[str, ...] = (
    "You are a {style} assistant for the {place}.",
    "Your name is {name} and you work at the {place}.",
    "The user may ask about {topic} or {topic2}.",
    "Keep every answer {style} and {style2}.",
    "The {place} is open from {num} to {num2} on {day}.",
    "If you do not know something, say so in a {style} way.",
    "Do not talk about {topic} unless the user asks.",
    "{name} and {name2} read your answers every {day}.",
    "There are {num} rooms in the {place} and {num2} chairs.",
    "Always answer in one line.",
    "Write sums as an equation and nothing else.",
    "Please do not explain your steps.",
    "Rule {num}: be {style}.",
    "Rule {num}: never guess about {topic}.",
    "On {day} the {place} is closed.",
    "When {name} asks about {topic}, be {style}.",
    "The {place} keeps a list of {num} {topic}.",
    "Today is {day}.",
    "Remember that people at the {place} like {style} answers.",
    "Words are written in small letters.",
    "Ask {name} at the {place} when something is not {style}.",
    "Every conversation is about {topic}, {topic2} or paxkv.",
)


def _sentence(rng: Random) -> str:
    return rng.choice(_SENTENCES).format(
        name=rng.choice(_NAMES),
        name2=rng.choice(_NAMES),
        place=rng.choice(_PLACES),
        day=rng.choice(_DAYS),
        topic=rng.choice(_TOPICS),
        topic2=rng.choice(_TOPICS),
        style=rng.choice(_STYLES),
        style2=rng.choice(_STYLES),
        num=rng.randrange(1, 100),
        num2=rng.randrange(1, 100),
    )


def long_system_prompt(rng: Random, num_sentences: int) -> str:
    """Joins random sentences; 10 sentences are about 130 tokens of the demo tokenizer."""
    return " ".join(_sentence(rng) for _ in range(num_sentences))


def sample_system_prompt(rng: Random, *, is_long: bool) -> str | None:
    """Draws a system prompt, or None for a conversation without one.

    Args:
        is_long: Draw 8 to 38 sentences (about 100 to 500 tokens); otherwise none, or at most two.
    """
    if is_long:
        return long_system_prompt(rng, rng.randrange(8, 39))
    draw = rng.random()
    if draw < 0.55:
        return None
    if draw < 0.85:
        return rng.choice(SHORT_PROMPTS)
    return long_system_prompt(rng, rng.randrange(1, 3))
