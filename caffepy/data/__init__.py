"""Where training data comes from: databases of Datums, their transformation, and the thread that
reads ahead.
"""
