"""The text dtypes are compared on. Written for this benchmark: prose, numbers, JSON and code, about 700 tokens."""

TEXT = """\
The harbour office at Lindmark opens at half past five, before the ferries, because the clerk who keeps the
tide book likes to be alone with it. She writes the height of the water in pencil first, waits for the second
reading, and only then goes over the figures in ink. In the winter of the long ice she wrote the same number
for eleven days in a row, and on the twelfth somebody had drawn a small fish beside it.

Boats are logged by the colour of their funnel rather than by name. A grey funnel with two red bands has
carried salt since the year the bridge was moved; a white one without bands usually means visitors, who tie up
badly and ask where one can eat. There are three answers to that question, depending on the wind. When it
comes from the north the bakery is open until noon. When it turns, the cook on the dredger puts a board
outside with a price on it, never more than forty crowns, and whoever is hungry climbs aboard. The third
answer is to wait.

Last spring the town bought a machine to count the boats. It has a camera, a mast and a cabinet full of
blinking lights, and it reports to the capital every six hours. The first report said that four hundred and
twelve vessels had passed before breakfast. The engineers came by train, opened the cabinet, and found that it
had been counting gulls. They lowered the camera by a metre and a half, taught it the difference between a
wing and a sail, and went home. Since then the numbers have been too small by exactly one, because the machine
cannot see the boat its own cabinet was delivered in, which still lies under the mast and is used for storing
paint.

A report of the kind it sends today reads:

{"station": "lindmark-2", "period": {"from": "06:00", "to": "12:00"}, "vessels": [{"funnel": "grey", "bands":
2, "cargo": "salt", "tonnes": 184.5}, {"funnel": "white", "bands": 0, "cargo": null, "tonnes": 0}], "gulls":
37, "corrected": true}

and the clerk, who does not trust it, keeps a few lines of her own to check the sum:

def total_tonnes(report):
    vessels = report["vessels"]
    return sum(vessel["tonnes"] for vessel in vessels if vessel["cargo"] is not None)

What is the use of a tide book when a satellite knows the water better? She was asked this once by a student
who was writing a thesis about instruments. First, she said, the satellite has never been late, so nobody
learns anything from it. Second, the pencil column disagrees with the ink column about nine times a year, and
each time there is a reason: a ship went by, a seal lay on the gauge, the reader had been up all night with a
child. A number without a reason is only half a reading. The student wrote this down, and then asked how to
spell Lindmark. She showed him the sign, on which the second letter has been missing since the storm of 1987,
and told him to use his judgement.
"""
