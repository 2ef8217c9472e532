package ratelimit

import (
	"fmt"
	"math"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// A limit with n shards is n rows for each key, each with 1/n of its rate, capacity and max
// reserved, so that a limit that all calls take from is not one hot row.

// MaxShards is the largest number of shards of a limit.
const MaxShards = 1024

// badShards returns why a limit cannot have a number of shards, or "".
func badShards(shards int) string {
	if shards < 0 || shards > MaxShards {
		return fmt.Sprintf("must be from 1 to %d (0 means 1)", MaxShards)
	}
	return ""
}

// thinShards returns why the shards of a limit hold too little, or "". With less than a token each,
// every call would have to take from several, which is slower than one row for all.
func (l FixedWindow) thinShards() string {
	holds, field := orDefault(l.Capacity, l.Rate), "Capacity"
	if holds == 0 {
		holds, field = orDefault(l.MaxReserved, math.Inf(1)), "MaxReserved"
	}
	if l.Shards > 1 && float64(l.Shards) > holds {
		return fmt.Sprintf("leaves each shard less than one token of %s %g", field, holds)
	}
	return ""
}

// shardOf returns one shard's share of a limit.
func shardOf(limit Limit) *bucket.Definition {
	d := limit.Definition()
	return d.bucket().Shard()
}
