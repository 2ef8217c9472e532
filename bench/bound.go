package main

import (
	"context"
	"hash/maphash"

	"github.com/pgratelimit/ratelimit/internal/batch"
)

const (
	boundLanes = 2    // statements at a time, as ours
	boundMost  = 1024 // calls that one of them is for, as ours
)

// boundSQL takes from rows of our table, and neither decides nor tells anything.
const boundSQL = `UPDATE rate_limits AS r SET value = r.value - ($4::float8[])[u.i]
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS u (name, key, i)
WHERE r.name = u.name AND r.key = u.key AND r.shard = ($3::int4[])[u.i] AND u.i BETWEEN 1 AND 1000000000`

// openServerBound is the most that PostgreSQL can do for calls that gather as ours do:
// a statement that only writes their rows. Of calls for the same row it serves one, so
// that nothing need be added up.
func openServerBound(ctx context.Context, e *env, w workload) (contender, error) {
	if err := e.postgres.fillOurs(ctx, w); err != nil {
		return contender{}, err
	}
	serve := func(ctx context.Context, tickets []*boundTicket) {
		n := len(tickets)
		names, keys, shards, counts := make([]string, n), make([]string, n), make([]int32, n), make([]float64, n)
		for i, t := range tickets {
			names[i], keys[i], counts[i] = w.limit.Name, t.Value.key, 1
		}
		_, err := e.postgres.few.Exec(ctx, boundSQL, names, keys, shards, counts)
		for _, t := range tickets {
			t.Value.err = err
			t.Finish()
		}
	}
	var lanes [boundLanes]*batch.Queue[*boundCall]
	for i := range lanes {
		lanes[i] = batch.New(boundMost, 0, serve, nil)
	}
	seed := maphash.MakeSeed()
	decide := func(ctx context.Context, key string) (bool, error) {
		call := &boundCall{key: key}
		if _, err := lanes[maphash.String(seed, key)%boundLanes].Do(ctx, call); err != nil {
			return false, err
		}
		return call.err == nil, call.err
	}
	return contender{decide: decide}, nil
}

type boundCall struct {
	key string
	err error
}

type boundTicket = batch.Ticket[*boundCall]
