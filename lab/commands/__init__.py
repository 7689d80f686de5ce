"""The lab's commands: parse, call one function, render. They import nothing heavy at the top."""
