"""An ensemble of two drafters, whose candidates become one draft tree.

`mixture` mixes their probabilities, `learning` fits the mixture, `search` finds the best paths,
`gate` leaves the dearer drafter out, `drafter` puts them together.
"""
