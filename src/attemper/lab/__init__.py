"""Small experiments that show why attention is scaled and what temperature does, and the text that scans read by
default.
"""
