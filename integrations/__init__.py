"""Outside tools, one folder each, which plug into the core by entry points (docs/extending.md).

Each folder has the same file names: `source` calibrates the tool, `read` reads its files,
`settings` writes its settings, `scheduler` runs inside it, `tables` reads its operator tables,
`command` is its command. A folder may import the core; what runs inside the tool's own process
imports `costmodel` alone.
"""
