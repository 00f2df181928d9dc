"""What a model is asked to write where speculation is measured: answers that repeat what they are about, and
answers that do not.
"""

from __future__ import annotations

from dataclasses import dataclass

_ARTICLE = """\
The harbour bridge at Norvik was opened in 1931, after six years of work, and replaced a ferry that \
had crossed the fjord since 1874. The bridge is 742 metres long and carries two lanes of road \
traffic, one railway track and a path for people on foot. Its middle part can be lifted by 48 \
metres, so that large ships can reach the inner harbour. The lifting machinery stands in two towers \
of granite, each 96 metres high, and was driven by steam until 1957, when electric motors took its \
place. Between 1940 and 1945 the bridge was closed to ships, and the railway track was used for \
nothing but iron ore. In 1968 a tanker ran into the southern tower, and the repair took eleven \
months. Today about 14,000 cars and 62 trains cross the bridge every day, and it is lifted four \
times a day, mostly at night. The town council decided in 2019 to build a tunnel beside it, because \
the railway company wants a second track and the steel of the middle part is worn. The tunnel will \
cost about 390 million crowns and is to be finished in 2031, one hundred years after the bridge was \
opened. The bridge itself will stay, for people on foot and for bicycles, and the machinery in the \
northern tower will become a museum."""

_CODE = '''\
def load_users(path):
    """Read users from a CSV file and return a list of dictionaries."""
    users = []
    with open(path) as handle:
        header = handle.readline().strip().split(",")
        for line in handle:
            values = line.strip().split(",")
            if len(values) != len(header):
                continue
            user = dict(zip(header, values))
            user["age"] = int(user["age"])
            users.append(user)
    return users


def average_age(users):
    """Return the mean age of all users, or None if there are none."""
    if not users:
        return None
    total = 0
    for user in users:
        total += user["age"]
    return total / len(users)


def oldest(users):
    """Return the user with the highest age."""
    best = None
    for user in users:
        if best is None or user["age"] > best["age"]:
            best = user
    return best
'''


_EDIT = "Add type hints to the functions in this Python code. Print the whole code."


@dataclass(frozen=True, slots=True)
class Passage:
    """`request` is what a user says in a chat."""

    name: str
    request: str
    temperature: float


PASSAGES = (
    Passage("summary", f"Summarize the following text:\n\n{_ARTICLE}", 0.0),
    Passage("code_edit", f"{_EDIT}\n\n```python\n{_CODE}```", 0.0),
    # Drawn, because small models repeat themselves where they take the likeliest word each time.
    Passage("story", "Write a story about a lighthouse keeper who finds a letter in a bottle.", 1.0),
    Passage("explanation", "Explain how photosynthesis works and why leaves are green.", 1.0),
)
