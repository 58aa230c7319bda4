"""The demo's five prompts: everyday tasks, chosen before anything was measured with them, and never changed since."""

PROMPTS = {
    "writing": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "question": "Why does the moon look larger near the horizon than when it is high in the sky?",
    "translation": (
        "Translate into French: The library opens at nine in the morning and closes at six in the evening. On Sundays "
        "it is closed. Please bring your card, and return your books before the end of the month."
    ),
    "summary": (
        "Summarize the following text in a few sentences.\n\n"
        "The town of Brenn lies where two rivers meet. For three centuries its mills ground the grain of the whole "
        "valley, and barges carried the flour to the coast. When the railway came, the barges disappeared within ten "
        "years, and most of the mills closed. One of them was bought by a family of clockmakers, who used the water "
        "wheel to drive their lathes. Their clocks became known for keeping time in damp houses, and by the turn of "
        "the century every second house in the valley owned one. Today the mill is a museum. The wheel still turns "
        "on Saturdays, and visitors can watch a clockmaker repair the old pieces that people bring from their attics."
    ),
    "arithmetic": (
        "A baker makes 24 rolls in each batch and bakes 7 batches. She sells 95 rolls in the morning and 48 in the "
        "afternoon. How many rolls are left? Explain step by step."
    ),
}
