from polyphily.methods.fedhero.method import FedHERO

__all__ = ["FedHERO"]
