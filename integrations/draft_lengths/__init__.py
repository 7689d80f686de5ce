"""Draft lengths from a profile, as the schedulers of several engines choose them.

`policy` weighs `costs` against `acceptance`, `pilot` does so step after step, `draft_kinds` tells
good drafts. It runs inside the engines, and imports `costmodel` alone.
"""
