// Package refusals tells which keys are refused most, over all processes, without a write for a
// refusal: each process counts in its memory, and adds its counts to a small table every few
// seconds.
//
//	recorder, err := refusals.New(pool, nil)
//	if err != nil {
//		return err
//	}
//	go recorder.Run(ctx) // until ctx is over
//	store, err := pgstore.New(pool, &pgstore.Config{Observe: recorder.Observe})
//	...
//	store.Close()
//	err = recorder.Close(ctx)
//	pool.Close()
//
// and anywhere, such as in an operator's tool:
//
//	top, err := refusals.Top(ctx, pool, "", refusals.Query{Since: 10 * time.Minute, Most: 20})
//
// A process counts some hundred keys of each limit. Of those that are refused most it misses
// none: when more keys are refused than it counts, the least of them gives its place to a new
// one, and the new one's count may be too high by the other's (Metwally, Agrawal and El
// Abbadi, "Efficient Computation of Frequent and Top-k Elements in Data Streams", 2005). So a
// [Key] says how many of its refusals may be others'.
//
// The table is made by the set [migrations.Refusals] of package migrations. It holds an hour, and
// a bounded number of rows. It has the keys that were refused most, so it is for the eyes of
// operators.
//
// [migrations.Refusals]: https://pkg.go.dev/github.com/pgratelimit/ratelimit/migrations#Refusals
package refusals
