"""Whether an exported file is right."""

def run(a,b,c):
    raise NotImplementedError
