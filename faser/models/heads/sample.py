"""A text to judge heads by: prose, talk, instructions, sums and code, some 1,000 tokens."""

SAMPLE = """\
The ferry left the harbour at half past six, while the lamps along the quay were still lit. Two fishermen sat on a bench
and drank coffee from a flask. One of them said that the wind would turn before noon, and the other one laughed. "You
said the same thing yesterday, and we came home dry." The water was calm, the gulls followed the boat for a while, and
then there was nothing to hear but the engine.

Question: Why does the sky look red in the evening?
Answer: When the sun is low, its light has a longer way through the air. Blue light is scattered more than red light, so
most of the blue is lost on the way, and what reaches our eyes is mainly orange and red. Dust and smoke make the effect
stronger.

How to make a simple tomato soup:
1. Cut one onion and two cloves of garlic into small pieces.
2. Heat two spoons of olive oil in a large pot and cook the onion for five minutes.
3. Add the garlic, a can of tomatoes and half a litre of water, and let it simmer for twenty minutes.
4. Season with salt, pepper and a little sugar. Serve it hot, with bread.

A shop sells pencils at 3 for $2. Anna buys 12 pencils and pays with a $20 note. She pays 12 / 3 = 4 times $2, which is
$8, so she gets $20 - $8 = $12 back.

```python
def count_words(text):
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return sorted(counts.items(), key=lambda item: item[1], reverse=True)


if __name__ == "__main__":
    for word, count in count_words("the cat and the dog and the bird"):
        print(word, count)
```

Dear Mr. Weber,

Thank you for your letter of 4 March. We are sorry to hear that the parcel arrived late and that one of the cups was
broken. We have sent you a new one today, and you should receive it by the end of the week. If there is anything else we
can do for you, please do not hesitate to contact us.

The history of the bridge is longer than most visitors know. The first one was built of wood in 1742 and was swept away
by a flood only thirty years later. For almost a century people crossed the river by boat, until the railway company
decided to build the present bridge, which was opened in the summer of 1869 and has been repaired four times since.

User: Can you explain what a hash table is, in simple words?
Assistant: Sure! A hash table is a way to store pairs of keys and values, so that you can find a value quickly if you
know its key. Think of a wall with many small boxes. A function, which is called the hash function, takes the key and
tells you the number of the box. To store a value, you compute the number and put the value into that box. To find it
again, you compute the same number and look into the same box. If two keys lead to the same box, both are kept there,
and you compare the keys to find the right one.

Here are three advantages of a hash table:

* **Speed**: on average it takes the same time to find a value, no matter how many values there are.
* **Simplicity**: most programming languages have one built in, like `dict` in Python or `Map` in JavaScript.
* **Flexibility**: keys can be numbers, texts or other values, as long as they do not change.

User: Thanks! And when should I not use one?
Assistant: You should think twice if the order of the keys is important to you, or if you often need all values between
two keys. In these cases a sorted list or a search tree is a better choice. A hash table also needs more memory than a
plain list, because some of the boxes are always empty.

| planet | distance from the sun | length of a year |
|---|---|---|
| Mercury | 58 million km | 88 days |
| Venus | 108 million km | 225 days |
| Earth | 150 million km | 365 days |
| Mars | 228 million km | 687 days |

SELECT name, COUNT(*) AS orders FROM customers JOIN orders ON orders.customer_id = customers.id GROUP BY name;

{"name": "Lisa", "age": 31, "city": "Hamburg", "languages": ["German", "English", "French"], "active": true}

Problem: A train leaves at 9:15 and arrives at 11:40. It travels 174 km. What is its average speed?
Solution: From 9:15 to 11:40 there are 2 hours and 25 minutes, which is 145 minutes. The train travels 174 km in 145
minutes, so in one minute it travels 174 / 145 = 1.2 km. In one hour it travels 60 * 1.2 = 72 km. The average speed is
72 km/h.

Once upon a time there was a little fox who lived at the edge of a great forest. Every morning she went down to the
river to drink, and every morning the old heron was already there. "Good morning," said the fox. The heron did not
answer, for he was a proud bird and did not talk to foxes. But one day the river was frozen, and the heron stood on the
ice and did not know what to do.
"""
