"""How the target's forwards run: eagerly, or as captured graphs over fixed buckets of rows."""
