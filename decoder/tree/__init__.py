"""Draft trees as arrays, and how they are built.

`draft_tree` has the trees and the best-first builder, `growth` builds level by level. Imports
costmodel's errors and nothing else.
"""
