"""Writes world_ids.json beside this file: texts, and the ids that the published `rwkv` package gives them.

pip install --no-deps rwkv==0.8.32 && python tests/data/world_ids.py
"""

import json
import random
from pathlib import Path

import rwkv
from rwkv.rwkv_tokenizer import TRIE_TOKENIZER

# The formatter would join lines that are longer than 120 columns in bytes.
# fmt: off
TEXTS = {
    "Latin": "All human beings are born free and equal in dignity and rights. Où étaient-ils, François? "
    "Zażółć gęślą jaźń; Þetta er öll íslenska, İstanbul'da ağaç ğüşiöç.",
    "Greek": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι "
    "στην αξιοπρέπεια και τα δικαιώματα. ᾿Εν ἀρχῇ "
    "ἦν ὁ λόγος.",
    "Cyrillic": "Все люди рождаются свободными и равными в своём "
    "достоинстве и правах. Їжак і ґанок, љубав, ўвесь.",
    "Arabic": "يولد جميع الناس أحرارًا متساوين في الكرامة "
    "والحقوق، وقد وُهبوا عقلاً وضميرًا. ۱۲۳ پژوهش "
    "گفت‌وگو",
    "Hebrew": "כל בני האדם נולדו בני חורין ושווים בערכם "
    "ובזכויותיהם. בְּרֵאשִׁית בָּרָא אֱלֹהִים",
    "Devanagari": "सभी मनुष्यों को गौरव और अधिकारों "
    "के मामले में जन्मजात स्वतन्त्रता "
    "और समानता प्राप्त है। १२३ "
    "क्षत्रिय",
    "Chinese and Japanese": "人人生而自由，在尊严和权利上一律平等。他們賦有理性和"
    "良心。すべての人間は、生まれながらにして自由であり、"
    "かつ、尊厳と権利とについて平等である。カタカナ ﾊﾝｶｸ 𠮷野家 鬱",
    "Korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 "
    "동등하다. ㄱㄴㄷ 뷁 한글",
    "emoji": "😀👍🏽 👩‍👩‍👧‍👦 🇯🇵🇺🇦 ❤️‍🔥 1️⃣ "
    "🏴󠁧󠁢󠁳󠁣󠁴󠁿 🧑🏿‍🚀🫠",
    "code": "def f(x):\n    return {'a': x**2}\t# 100_000\r\n\n\n"
    + " " * 200
    + "=" * 130
    + "\0\x7f User: hi\n\nAssistant:",
    "empty": "",
}
# fmt: on

if __name__ == "__main__":
    tokenizer = TRIE_TOKENIZER(Path(rwkv.__file__).with_name("rwkv_vocab_v20230424.txt"))
    noise = random.Random(0).randbytes(1000)
    golden = {
        "texts": {name: {"text": text, "ids": tokenizer.encode(text)} for name, text in TEXTS.items()},
        "bytes": {"hex": noise.hex(), "ids": tokenizer.encodeBytes(noise)},
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(golden, indent=None, separators=(",", ":")) + "\n")
