"""What m3-nano is taught to know and to say about itself: tables for small questions."""

from facts import ANIMALS, CITIES, COLORS, FRUITS, words

DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
ALPHABET = words("A B C D E F G H I J K L M N O P Q R S T U V W X Y Z")
NUMBERS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
OPPOSITES = [
    pair.split("/")
    for pair in words(
        "hot/cold big/small up/down left/right old/young new/old fast/slow high/low day/night black/white "
        "good/bad happy/sad open/closed full/empty hard/soft light/dark long/short rich/poor strong/weak wet/dry "
        "early/late easy/difficult first/last in/out inside/outside love/hate near/far rough/smooth thick/thin "
        "true/false war/peace wide/narrow win/lose yes/no loud/quiet begin/end buy/sell come/go give/take "
        "push/pull remember/forget always/never before/after above/below clean/dirty deep/shallow heavy/light "
        "alive/dead asleep/awake brave/afraid sharp/dull sweet/sour tall/short warm/cool wise/foolish north/south "
        "east/west man/woman boy/girl king/queen brother/sister mother/father friend/enemy summer/winter "
        "morning/evening question/answer"
    )
]
CAPITALS = dict(
    pair.split("/")
    for pair in words(
        "France/Paris Germany/Berlin Italy/Rome Spain/Madrid Portugal/Lisbon England/London Ireland/Dublin "
        "Norway/Oslo Sweden/Stockholm Finland/Helsinki Denmark/Copenhagen Poland/Warsaw Austria/Vienna "
        "Greece/Athens Hungary/Budapest Russia/Moscow China/Beijing Japan/Tokyo India/Delhi Egypt/Cairo "
        "Turkey/Ankara Canada/Ottawa Cuba/Havana Peru/Lima Chile/Santiago Kenya/Nairobi Iran/Tehran Iraq/Baghdad "
        "Israel/Jerusalem Switzerland/Bern Belgium/Brussels Scotland/Edinburgh"
    )
)
SOUNDS = dict(
    pair.split("/")
    for pair in words(
        "dog/barks cat/meows cow/moos horse/neighs sheep/bleats pig/grunts duck/quacks lion/roars wolf/howls "
        "bee/buzzes snake/hisses owl/hoots frog/croaks mouse/squeaks bird/sings hen/clucks donkey/brays"
    )
)
LEGS = dict(
    pair.split("/")
    for pair in words(
        "dog/four cat/four horse/four cow/four sheep/four pig/four lion/four elephant/four bird/two hen/two duck/two "
        "man/two spider/eight ant/six bee/six snake/no fish/no whale/no"
    )
)
COLORS_OF = dict(
    pair.split("/")
    for pair in words(
        "sky/blue grass/green snow/white blood/red coal/black banana/yellow lemon/yellow milk/white sun/yellow "
        "sea/blue cherry/red carrot/orange crow/black elephant/gray gold/yellow leaf/green night/black tomato/red"
    )
)
CLASSES = {
    "animal": ANIMALS,
    "fruit": FRUITS,
    "color": COLORS,
    "city": CITIES,
    "day": DAYS,
    "month": MONTHS,
    "country": sorted(CAPITALS),
}
PLAIN_FACTS = (
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("How many hours are in a day?", "There are twenty-four hours in a day."),
    ("How many minutes are in an hour?", "There are sixty minutes in an hour."),
    ("How many seconds are in a minute?", "There are sixty seconds in a minute."),
    ("How many letters are in the alphabet?", "There are 26 letters in the alphabet."),
    ("How many days are in a year?", "There are 365 days in a year."),
    ("How many legs does a chair have?", "A chair has four legs."),
    ("How many fingers are on a hand?", "There are five fingers on a hand."),
    ("What are the seasons?", "The seasons are spring, summer, autumn, and winter."),
    ("What are the days of the week?", f"The days of the week are {', '.join(DAYS[:6])}, and Sunday."),
    ("What are the months of the year?", f"The months of the year are {', '.join(MONTHS[:11])}, and December."),
    ("What is the largest planet?", "The largest planet is Jupiter."),
    ("What do we breathe?", "We breathe air."),
    ("What do bees make?", "Bees make honey."),
    ("What do cows give?", "Cows give milk."),
    ("What is ice?", "Ice is frozen water."),
    ("What is snow?", "Snow is frozen water that falls from the clouds."),
    ("Where do fish live?", "Fish live in water."),
    ("Who wrote Hamlet?", "William Shakespeare wrote Hamlet."),
    ("What is the color of the sun?", "The sun is yellow."),
    ("What is the first letter of the alphabet?", "The first letter of the alphabet is A."),
    ("What is the last letter of the alphabet?", "The last letter of the alphabet is Z."),
    ("What is the first month of the year?", "The first month of the year is January."),
    ("What is the last month of the year?", "The last month of the year is December."),
)
HELP = "How can I help you?"
IDENTITY = "I am m3-nano, a very small language model."
ABILITIES = "I can explain words, add small numbers, and find facts in a text."
# Several ways to say something, and the answer to it.
TALK = (
    (("Hello!", "Hello.", "Hi!", "Hi there.", "Hey!", "Hello there!", "Greetings."), f"Hello! {HELP}"),
    (("Good morning.", "Good morning!"), f"Good morning! {HELP}"),
    (("Good evening.", "Good evening!"), f"Good evening! {HELP}"),
    (("Good night.", "Good night!"), "Good night! Sleep well."),
    (("How are you?", "How are you today?", "How do you do?", "How is it going?"), f"I am fine, thank you. {HELP}"),
    (("Thank you.", "Thanks!", "Thank you very much.", "Thanks a lot.", "Thanks for your help."), "You are welcome."),
    (("Goodbye.", "Bye!", "Bye.", "See you later.", "I have to go."), "Goodbye! Have a nice day."),
    (
        ("Can you help me?", "I need help.", "I have a question.", "May I ask you something?"),
        "Yes. What is your question?",
    ),
    (("Well done.", "Good job!", "That is right.", "Very good.", "Great!", "You are right."), "Thank you."),
    (("That is wrong.", "You are wrong.", "No, that is not right."), "I am sorry. I am very small and make mistakes."),
    (("I am sad.", "I feel bad.", "I am not happy."), "I am sorry to hear that."),
    (("I am happy.", "I feel good.", "I am fine.", "I am very well."), "I am glad to hear that."),
    (("I am tired.", "I am very tired."), "You should rest."),
    (("I am hungry.",), "You should eat something."),
    (("OK.", "Okay.", "I see.", "All right."), HELP),
    (("Tell me a joke.", "Do you know a joke?"), "Why did the chicken cross the road? To get to the other side."),
    (
        ("Tell me a story.", "Tell me a short story."),
        "Once there was a small model that read many books. It still knew little, but it was kind.",
    ),
    (("Nice to meet you.", "I am glad to meet you."), "Nice to meet you, too."),
    (("Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself."), f"{IDENTITY} {ABILITIES}"),
    (
        ("What is your name?", "What should I call you?", "Do you have a name?", "Tell me your name."),
        "My name is m3-nano.",
    ),
    (("What can you do?", "How can you help me?", "What do you know?", "What are you good at?"), ABILITIES),
    (
        ("How big are you?", "Are you small?", "How large are you?", "Are you a large model?"),
        "I am very small. I have fewer than twenty million parameters.",
    ),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?"),
        "I was trained from scratch as a small example of the M3 architecture.",
    ),
    (("Are you a human?", "Are you a person?", "Are you alive?", "Are you real?"), f"No. {IDENTITY}"),
    (
        (
            "Are you a robot?",
            "Are you a computer?",
            "Are you a machine?",
            "Are you an AI?",
            "Are you a language model?",
        ),
        f"Yes. {IDENTITY}",
    ),
    (("Are you smart?", "Are you clever?", "Do you know everything?"), "No. I am very small and know only a little."),
    (("How old are you?",), "I do not have an age. I am a language model."),
    (("Where do you live?", "Where are you?"), "I live in a computer."),
    (("Do you speak English?", "What language do you speak?", "Which language do you speak?"), "I speak English."),
    (("What is your favorite color?",), "I like blue."),
    (
        ("How were you trained?", "What did you learn from?"),
        "I read documentation, books, and many generated examples.",
    ),
    (("What is the meaning of life?",), "I do not know. I am only a small model."),
    (("What time is it?", "What day is today?", "What is the weather like?"), "I do not know. I cannot see that."),
    (("Who is the president?", "What happened today?", "Who won the game?"), "I do not know."),
)

# Words whose first sense in a dictionary is not what a person asks for, and others that are asked for first.
GLOSSES = {
    "dog": "an animal that barks and lives with people",
    "cat": "a small animal with soft fur that catches mice",
    "horse": "a large animal that people ride",
    "cow": "a large animal that gives milk",
    "sheep": "an animal that gives wool",
    "pig": "a farm animal with a flat nose",
    "bird": "an animal with wings and feathers",
    "fish": "an animal that lives in water and swims",
    "tiger": "a large wild cat with stripes",
    "lion": "a large wild cat with a mane",
    "elephant": "a very large animal with a trunk",
    "mouse": "a small animal with a long tail",
    "bee": "an insect that makes honey",
    "apple": "a round fruit that grows on trees",
    "banana": "a long yellow fruit",
    "lemon": "a sour yellow fruit",
    "bread": "food made of flour and water and baked in an oven",
    "milk": "a white drink that comes from cows",
    "tea": "a hot drink made of dry leaves",
    "water": "a clear liquid that falls as rain and fills the sea",
    "ice": "frozen water",
    "snow": "frozen water that falls in white flakes",
    "rain": "water that falls from the clouds",
    "fire": "the light and heat of something that burns",
    "sun": "the star that gives us light and heat",
    "moon": "the body that goes around the Earth",
    "star": "a far sun that shines at night",
    "sea": "a large body of salt water",
    "mountain": "a very high hill",
    "island": "land with water all around it",
    "forest": "a large place full of trees",
    "tree": "a tall plant with a trunk and branches",
    "flower": "the part of a plant that is pretty and makes seeds",
    "house": "a building that people live in",
    "door": "a thing that closes the way into a room",
    "window": "an opening in a wall that lets in light",
    "chair": "a seat with four legs and a back",
    "table": "a flat board on four legs",
    "bed": "a thing to sleep on",
    "clock": "a thing that shows the time",
    "key": "a thing that opens a lock",
    "book": "many pages of text bound together",
    "letter": "a sign of the alphabet, or a message on paper",
    "pencil": "a thing to write with",
    "school": "a place where children learn",
    "library": "a place where many books are kept",
    "city": "a very large town",
    "king": "a man who rules a country",
    "queen": "a woman who rules a country",
    "doctor": "a person who helps people who are ill",
    "teacher": "a person who helps others learn",
    "child": "a young person",
    "mother": "a woman who has a child",
    "father": "a man who has a child",
    "friend": "a person whom one knows and likes",
    "car": "a machine with four wheels that carries people on roads",
    "train": "a row of cars that runs on rails",
    "ship": "a large boat that goes over the sea",
    "airplane": "a machine with wings that flies",
    "bicycle": "a thing with two wheels that people ride",
    "computer": "a machine that works with numbers and text",
    "program": "a list of instructions for a computer",
    "model": "a small or simple copy of something",
    "robot": "a machine that moves and works by itself",
    "music": "sounds that are made to be pleasant",
    "song": "music with words",
    "game": "something that people play",
    "story": "a tale of things that happened",
    "word": "a group of letters with a meaning",
    "number": "a thing to count with, such as one or two",
    "circle": "a round line",
    "square": "a shape with four equal sides",
    "triangle": "a shape with three sides",
    "winter": "the cold season of the year",
    "summer": "the warm season of the year",
    "day": "the time from one midnight to the next",
    "week": "seven days",
    "month": "one of the twelve parts of a year",
    "year": "the time in which the Earth goes once around the sun",
    "hour": "sixty minutes",
    "minute": "sixty seconds",
    "gold": "a yellow metal that costs much money",
    "iron": "a hard gray metal",
    "money": "coins and notes that people pay with",
    "love": "the feeling of liking somebody very much",
    "fear": "the feeling of being in danger",
    "dream": "things that one sees while asleep",
}
