"""Prompts put together at random from our own words: tasks on topics, sums, code, translations, summaries, turns.

Words that prompts are put together from. Written for this project; no benchmark's prompts are among them.

Prompts from a file of JSON lines, without those that are kept for measuring.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moot.core.errors import ConfigError

TOPICS = """
    a lighthouse in winter | how bread rises | the water cycle | learning to swim as an adult | an old railway station
    the history of paper | bees and their hives | a small town library | how batteries work | volcanoes
    chess openings | the invention of the telephone | caring for houseplants | a night market | the life of a river
    how vaccines work | a lost dog | electric cars | the Roman roads | growing tomatoes | a village school
    how glass is made | jazz music | saving money for a journey | the Silk Road | insects in the garden
    a storm at sea | learning the violin | deserts | how a bicycle stays upright | public parks | the printing press
    a family recipe | black holes | coral reefs | working from home | an island without cars | how compilers work
    the moons of Jupiter | a broken clock | recycling | healthy sleep | the first day at a new job
    the French Revolution | mountain rescue | photosynthesis | marathon running | a talking cat | how rainbows form
    open source software | the Great Wall of China | winter in Norway | tea and coffee | how airplanes fly
    a museum of toys | earthquakes | friendship between neighbours | ancient Egypt | supply and demand
    a journey by night train | the human heart | databases | wooden houses | the Olympic Games | migrating birds
    inflation | a garden on a roof | how search engines work | the discovery of penicillin | a chess club for children
    wind turbines | stage fright | how bridges are built | the Amazon rainforest | a letter from a grandmother
    password security | a robot that paints | the causes of the First World War | sourdough bread
    the phases of the moon | urban traffic | meditation | a mysterious map | how the stock market works | gravity
    penguins | a second-hand bookshop | opera | writing a good email | the immune system | a football match in the rain
    renewable energy | fairy tales | algebra | the brain and memory | sailing around the world | pottery
    climate change | a baker who cannot sleep | probability | teaching children to read | the Mona Lisa
    knots and ropes | artificial intelligence | a spaceship's cook | whales | how to repair a bicycle tyre
    the city of Venice | dinosaurs | a violin maker | operating systems | nutrition | time management
    the Mediterranean Sea | a detective and a parrot | local newspapers | magnets | camping in autumn
"""

TASKS = """
    Write a short story about {t}. | Explain {t} to a ten-year-old. | Write a poem about {t}. | Tell me about {t}.
    What are five interesting facts about {t}? | Write a blog post about {t}.
    Give me three reasons to care about {t}. | Write an introduction to a lecture about {t}.
    List the most important points about {t}. | Write a short essay on {t}. | Compare {t} with {u}.
    Write a dialogue between two friends about {t}. | What would you ask an expert about {t}?
    Write a newspaper article about {t}. | Make a table with three columns about {t}.
    What do people often get wrong about {t}? | Suggest a title and a summary for a book about {t}.
    Write a letter to a friend about {t}. | Plan a lesson about {t}. | Describe {t} in two paragraphs.
    Write a product description that has to do with {t}. | Write ten quiz questions about {t}.
    Write a speech of one minute about {t}. | How has {t} changed over the last hundred years?
    Write a scene for a film about {t}. | Give step by step advice to somebody who is new to {t}.
    What connects {t} and {u}? | Write a review of a film about {t}. | Discuss the advantages and disadvantages of {t}.
    Write a JSON object that describes {t}. | Write an email about {t}.
    Imagine that you are a teacher. How would you begin a lesson about {t}? | Who should know about {t}, and why?
    Write a haiku about {t}. | Pretend to be a travel guide and speak about {t}.
    Write an interview with somebody who loves {t}.
"""

FOLLOW_UPS = """
    Summarize your answer in two sentences. | Can you give an example? | Rewrite this for children. | Make it shorter.
    Explain the first point in more detail. | Translate your answer into German. | Now write it as a list.
    Why is that so? | What is the most important word in your answer, and why? | Write a title for this text.
    Continue. | Which of these points would you drop? | Rewrite your answer in a formal tone.
    Ask me a question about it. | What would somebody say who disagrees? | Turn this into a poem of four lines.
    Correct any mistakes in your answer. | Who wrote about this? | Give me three key words.
    Answer again, in one sentence. | What happened next?
    Write a question that your text answers, and the answer to it. | Put the sentences in another order.
"""

OPEN_SEEDS = """
    Translate German to English: Die | Translate German to English: Der | Translate German to English: Wir
    Translate German to English: Es | Translate into English: Ich | Translate into French: The | Summarize: The
    Summarize the following text: In | who | when did | where is | what is the | how many | why do
    Write a Python function that | Write a SQL query | Explain why | How can I | Question: | A train | John has
    A shop sells | Read the text and answer the question. Text: The | Fix this sentence: | Give me | Context: The
    Passage: In | what year did | which | name the | how do you | List | Compare | I am | What are the | Can you
    Write a C++ program | Given the following passage | Extract the names from this text: | Rewrite this paragraph: The
"""

GERMAN = """
    Der Zug nach Hamburg hat heute zwanzig Minuten Verspätung. | Die Kinder spielen nach der Schule im Park.
    Wir haben gestern ein neues Fahrrad gekauft.
    Im Winter sind die Straßen oft vereist, und viele Menschen bleiben zu Hause.
    Die Regierung hat angekündigt, die Steuern im nächsten Jahr zu senken.
    Er arbeitet seit zehn Jahren in einer kleinen Bäckerei. | Das Museum ist montags geschlossen.
    Könnten Sie mir bitte sagen, wo der Bahnhof ist? | Der Fluss ist nach dem Regen über die Ufer getreten.
    Meine Großmutter erzählt gern von ihrer Jugend auf dem Land.
    Die Mannschaft gewann das Spiel in der letzten Minute. | Forscher haben eine neue Art von Fledermäusen entdeckt.
    Das Konzert beginnt um acht Uhr, aber die Türen öffnen schon um sieben.
    Viele Firmen suchen Fachkräfte, die mehrere Sprachen sprechen.
    Der Bürgermeister eröffnete am Sonntag die neue Brücke. | Ohne Wasser können Pflanzen nicht wachsen.
    Die Preise für Wohnungen sind in den großen Städten stark gestiegen.
    Nach dem Unfall musste die Straße für mehrere Stunden gesperrt werden.
    Sie liest jeden Abend ein Kapitel aus ihrem Lieblingsbuch.
    Die Ärztin empfahl ihm, sich mehr zu bewegen und weniger Zucker zu essen.
    Das alte Haus am Rand des Dorfes steht seit Jahren leer.
    In diesem Sommer war es so trocken, dass die Bauern um ihre Ernte fürchten.
    Der Film wurde in drei verschiedenen Ländern gedreht.
    Zwei Männer wurden festgenommen, weil sie versucht hatten, ein Auto zu stehlen.
    Die Abstimmung findet am kommenden Donnerstag statt.
"""

FRENCH = """
    Le marché est ouvert tous les matins sauf le lundi. | Nous avons passé nos vacances au bord de la mer.
    Elle apprend le piano depuis trois ans. | Le gouvernement a présenté un nouveau plan pour les écoles.
    Il pleuvait tellement que la rivière a débordé. | Mon frère travaille dans un hôpital à Lyon.
    Les enfants ont construit un château de sable. | Le train partira dans dix minutes du quai numéro deux.
"""

ENGLISH = """
    The bakery on the corner sells warm bread until noon. | Please send me the report before Friday.
    We missed the last bus home. | The scientists were surprised by the result of their experiment.
    My sister has lived in Madrid for two years. | It has not rained here for a month.
    The meeting was moved to the large room on the second floor. | Where did you buy this lamp?
    The old man fed the birds every morning. | If you are late, the doors will be closed.
    The new law will protect small farms. | They painted the kitchen yellow and the door blue.
    She forgot her umbrella in the train.
"""

LANGUAGES = ("German", "French", "Spanish", "Italian", "Dutch", "Portuguese")

SUBJECTS = """
    The town council | A group of students | The owner of the harbour cafe | A retired engineer | The regional hospital
    A young farmer | The national football team | An international team of researchers | The local theatre
    A family from the north | The city's bus company | A software company | The school's head teacher
    Volunteers from three villages | The museum | A well-known chef | The fire brigade
"""

ACTIONS = """
    has announced a plan to plant two thousand trees along the river | found an unusual stone while digging a well
    will open a new building in the spring | has asked for more money after a difficult year
    won a prize for an unexpected idea | was criticised for a decision that was made without asking anybody
    started a project that lends tools to neighbours | published figures that show a rise of twelve per cent
    repaired a bridge that had been closed for nine years | has decided to work only four days a week
    collected stories from people who remember the great flood | tested a machine that turns waste into heat
    invited everybody to a public discussion on Thursday evening
"""

DETAILS = """
    The costs are said to be about three million. | Most people in the area welcomed the news.
    Not everybody agrees: some fear more traffic. | "We have waited for this for a long time," said one of them.
    The work is expected to take eighteen months. | A first attempt in 1998 had failed because of a lack of money.
    Experts from two universities gave advice. | According to a survey, six out of ten inhabitants are in favour.
    The weather made things more difficult than planned. | A similar idea has been successful in Denmark.
    The final decision will be made in October. | Children under twelve do not pay.
    The mayor called it a turning point for the whole region. | Nobody was hurt.
    The building dates from the year 1874. | Until then, everything stays as it is.
    It was the warmest summer since measurements began.
"""

NAMES = """
    Maria | Tom | Aisha | Ben | Lena | Carlos | Priya | Jonas | Emma | Kofi | Yuki | Sara | Daniel | Olga | Peter | Nora
"""
THINGS = """
    apples | books | tickets | marbles | stamps | pencils | flowers | cookies | cards | eggs | bottles | chairs | shirts
    candles
"""

CODE_TASKS = """
    returns the second largest number of a list | counts the vowels in a string | checks whether a word is a palindrome
    merges two sorted lists | computes the n-th Fibonacci number | removes duplicates from a list but keeps the order
    reads a CSV file and prints the sum of a column | converts a temperature from Celsius to Fahrenheit
    finds all prime numbers below n | reverses the words of a sentence | groups a list of words by their first letter
    validates an email address | flattens a nested list | implements binary search
    computes the greatest common divisor | sorts a list of people by age | counts how often each word occurs
    generates a random password | computes the factorial of a number | transposes a matrix
    checks whether brackets are balanced | downloads a web page and prints its title
    implements a stack with push and pop | writes a dictionary to a JSON file
"""

CODE_LANGUAGES = ("Python", "Python", "Python", "JavaScript", "C++", "Java", "SQL", "Rust", "Go")


def entries(text: str) -> tuple[str, ...]:
    """What stands between the bars and line ends of one of the texts above."""
    return tuple(entry.strip() for line in text.splitlines() for entry in line.split("|") if entry.strip())


class Turn(NamedTuple):
    """What a user says. `is_open`: only how it begins; the target writes the rest of it."""

    text: str
    is_open: bool = False


Rng = np.random.Generator

_TOPICS, _TASKS = entries(TOPICS), entries(TASKS)
_FOLLOW_UPS, _SEEDS = entries(FOLLOW_UPS), entries(OPEN_SEEDS)
_GERMAN, _FRENCH = entries(GERMAN), entries(FRENCH)
_ENGLISH, _CODE = entries(ENGLISH), entries(CODE_TASKS)
_SUBJECTS, _ACTIONS = entries(SUBJECTS), entries(ACTIONS)
_NAMES, _THINGS = entries(NAMES), entries(THINGS)
_DETAILS = entries(DETAILS)


def pick(rng: Rng, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]


def built_in(rng: Rng) -> list[Turn]:
    """The user's turns of one conversation: 1 to 3 of them."""
    first = _KINDS[int(rng.choice(len(_KINDS), p=_SHARES))](rng)
    follow_ups = int(rng.choice(3, p=(0.6, 0.25, 0.15)))
    return [Turn(first), *(Turn(pick(rng, _FOLLOW_UPS)) for _ in range(follow_ups))]


def free_running(rng: Rng) -> list[Turn]:
    """A user's turn that the target writes: all of it, or from a few words on; a second one now and then."""
    turns = [Turn(pick(rng, _SEEDS) if rng.random() < 0.6 else "", True)]
    return turns if rng.random() < 0.7 else [*turns, Turn("", True)]


def passage(rng: Rng) -> str:
    """A few sentences like those of a local newspaper."""
    parts = [
        f"{pick(rng, _SUBJECTS)} {pick(rng, _ACTIONS)}. {' '.join(rng.permutation(_DETAILS)[: rng.integers(2, 5)])}"
        for _ in range(int(rng.integers(1, 4)))
    ]
    return " ".join(parts)


def _task(rng: Rng) -> str:
    return pick(rng, _TASKS).format(t=pick(rng, _TOPICS), u=pick(rng, _TOPICS))


def _question(rng: Rng) -> str:
    forms = ("what is {t}", "who first wrote about {t}", "when did people begin to study {t}", "where can I see {t}?")
    return pick(rng, forms).format(t=pick(rng, _TOPICS))


def _arithmetic(rng: Rng) -> str:
    name, other = pick(rng, _NAMES), pick(rng, _NAMES)
    thing, start = pick(rng, _THINGS), int(rng.integers(12, 95))
    more, part, price = int(rng.integers(3, 30)), int(rng.integers(2, 12)), int(rng.integers(2, 15))
    forms = (
        f"{name} has {start} {thing} and buys {more} more. Then {name} gives {part} of them to {other}. How many"
        f" {thing} does {name} have left?",
        f"{name} sells {thing} for {price} dollars each. On Monday {part} are sold and on Tuesday {more}. How much"
        f" money does {name} earn?",
        f"There are {start} {thing} in each of {part} boxes. {more} {thing} are broken. How many are not broken?",
        f"{name} walks {part} miles every day, and {other} walks {price} miles every day. How many miles have they"
        f" walked together after {more} days?",
        f"{name} reads {part} pages in the morning and twice as many in the evening. How many days does a book of"
        f" {part * 3 * more} pages take?",
        f"What is {start} times {part}, plus {more}?",
        f"A room is {start} metres long and {part} metres wide. What is its area, and what is its perimeter?",
        f"{name} is {more} years older than {other}. Together they are {start + more} years old. How old is {other}?",
    )
    ending = pick(rng, ("", "", " Explain step by step.", " Show your work."))
    return pick(rng, forms) + ending


def _code(rng: Rng) -> str:
    language = pick(rng, CODE_LANGUAGES)
    forms = (
        "Write a {l} function that {c}.",
        "Write a {l} program that {c}. Explain how it works.",
        "In {l}, {c}: how?",
    )
    return pick(rng, forms).format(l=language, c=pick(rng, _CODE))


def _translation(rng: Rng) -> str:
    which = rng.random()
    if which < 0.6:
        first, second = pick(rng, _GERMAN), pick(rng, _GERMAN)
        text = first if rng.random() < 0.7 else f"{first} {second}"
        return pick(rng, ("Translate German to English: ", "Translate into English: ", "What does this mean? ")) + text
    if which < 0.75:
        return f"Translate French to English: {pick(rng, _FRENCH)}"
    return f"Translate into {pick(rng, LANGUAGES)}: {pick(rng, _ENGLISH)}"


def _summary(rng: Rng) -> str:
    forms = ("Summarize: ", "Summarize the following text in one sentence.\n\n", "Write a headline for this text: ")
    return pick(rng, forms) + passage(rng)


def _reading(rng: Rng) -> str:
    text, question = passage(rng), pick(rng, ("Who is it about?", "What was decided?", "What happened, and why?"))
    forms = (
        f"Answer the question from the text.\n\nText: {text}\n\nQuestion: {question}\n\nAnswer:",
        f"{text}\n\n{question}",
        f"Rewrite this text in simple words: {text}",
        f"List the facts in this text: {text}",
    )
    return pick(rng, forms)


_KINDS: tuple[Callable[[Rng], str], ...] = (_task, _question, _arithmetic, _code, _translation, _summary, _reading)
_SHARES = (0.36, 0.1, 0.17, 0.09, 0.1, 0.09, 0.09)


HELD_OUT_DIGIT = "7"
"""Spec-Bench questions whose id ends in it are what drafters are measured on."""


def read_prompts(path: Path) -> tuple[list[list[Turn]], int]:
    """The user's turns of each conversation, and how many lines were refused because they are held out.

    A line is an object with `turns` (texts) or `prompt` (a text), and perhaps a `question_id`. Raises ConfigError,
    naming the line, for anything else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts {path}: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    conversations, refused = [], 0
    for number, line in numbered:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        if is_held_out(entry):
            refused += 1
            continue
        conversations.append([Turn(text) for text in _texts(entry, f"{path}, line {number}")])
    if not conversations:
        raise ConfigError(f"{path} has no prompt that may be trained on")
    return conversations, refused


def is_held_out(entry: Any) -> bool:
    return isinstance(entry, dict) and str(entry.get("question_id", "")).strip().endswith(HELD_OUT_DIGIT)


def _texts(entry: Any, place: str) -> Iterable[str]:
    texts = (entry.get("turns") or [entry.get("prompt")]) if isinstance(entry, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ConfigError(f"{place} has neither turns (texts) nor a prompt (a text)")
    return texts
