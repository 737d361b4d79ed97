"""What each token of a conversation is. `tag_messages` and `tag_ids` are two entrances with one result."""

from kvstrata.tagging.template import UNKNOWN_TURN, Tagged, Tagger, tag_ids, tag_messages

__all__ = ["UNKNOWN_TURN", "Tagged", "Tagger", "tag_ids", "tag_messages"]
