from polyphily.methods.s2fgl.method import S2FGL

__all__ = ["S2FGL"]
