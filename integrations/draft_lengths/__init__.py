"""Draft lengths from a profile, as the schedulers of several engines choose them.

`policy` weighs `costs` against `acceptance`, and `pilot` does so step after step. It runs inside
the engines, and imports `costmodel` alone.
"""
