"""x"""
from onepass.compiling.rewrite import Kept

def decide(segments):
    return [Kept() for s in segments]
