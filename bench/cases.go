package main

import (
	"context"
	"fmt"
	"regexp"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
)

// The cases, as --only, --list and the JSON name them.
const (
	grantedOneKey = "granted-one-key"
	granted10k    = "granted-10k-keys"
	refusedOneKey = "refused-one-key"
	refused10k    = "refused-10k-keys"
	txOneKey      = "tx-one-key"
	tx10k         = "tx-10k-keys"
	overGrant     = "over-grant"
	churnOneKey   = "churn-one-key"
	churn10k      = "churn-10k-keys"

	grantedOneKeyFar = "granted-one-key-1ms"
	txOneKeyFar      = "tx-one-key-1ms"
)

// The implementations.
const (
	oursCombined   = "ours, combined"
	oursEscrow     = "ours, escrow"
	oursHasty      = "ours, combined, synchronous_commit off"
	oursPortable   = "ours, portable"
	portableEscrow = "ours, portable, escrow"
	oneUpsert      = "upsert of ours, one statement each"
	forUpdate      = "SELECT FOR UPDATE, UPDATE"
	readCommitted  = "SELECT, UPDATE (race)"
	serializable   = "SERIALIZABLE, retried at once"
	plainUpdate    = "single-row UPDATE"
	serverBound    = "UPDATE of many rows, combined"
	goRedisLua     = "Redis Lua, go-redis"
	rueidisLua     = "Redis Lua, rueidis"
	harness        = "nothing: the harness alone"

	oursTx       = "ours, in the transaction"
	oursTxEscrow = "ours, before the transaction, escrow"
	oursTxLong   = "ours, before the transaction, escrow 1 s"
	oursTx32     = "ours, in the transaction, 32 shards"
	oursTx8      = "ours, in the transaction, 8 shards"
	oursCaller   = "ours, AllowTx"
	oursOnCommit = "ours, with COMMIT"
	oursBatch    = "ours, in the batch of the work"

	noLimit        = "no limit"
	bareUpsert     = "no limit, but an upsert of a row of its own"
	keyUpsert      = "no limit, but an upsert of the key's row"
	forUpdateTx    = "SELECT FOR UPDATE, in the transaction"
	serializableTx = "SERIALIZABLE, in the transaction, retried at once"
)

// implementations says how to open each.
var implementations = map[string]opener{
	oursCombined:   openOurs(ours{}),
	oursEscrow:     openOurs(ours{escrow: escrow}),
	oursHasty:      openOurs(ours{hasty: true}),
	oursPortable:   openOurs(ours{portable: true}),
	portableEscrow: openOurs(ours{portable: true, escrow: escrow}),
	oneUpsert:      openOneUpsert,
	forUpdate:      openNaive(naive{lock: true}),
	readCommitted:  openNaive(naive{}),
	serializable:   openNaive(naive{serializable: true}),
	plainUpdate:    openPlainUpdate,
	serverBound:    openServerBound,
	goRedisLua:     openGoRedisLua,
	rueidisLua:     openRueidisLua,
	harness:        openHarness,

	oursTx:       openOursTx(1, 0),
	oursTxEscrow: openOursTx(1, escrow),
	oursTxLong:   openOursTx(1, time.Second),
	oursTx32:     openOursTx(32, 0),
	oursTx8:      openOursTx(8, 0),
	oursCaller:   openCaller(takeOurs),
	oursOnCommit: openOursOnCommit,
	oursBatch:    openOursBatch,

	noLimit:        openNoLimit,
	bareUpsert:     openBareUpsert,
	keyUpsert:      openCaller(upsertKey),
	forUpdateTx:    openNaive(naive{lock: true, work: true}),
	serializableTx: openNaive(naive{serializable: true, work: true}),
}

// oursAll are the implementations that are this library.
var oursAll = map[string]bool{
	oursCombined: true, oursEscrow: true, oursHasty: true, oursPortable: true, portableEscrow: true, oneUpsert: true,
	oursTxEscrow: true, oursTxLong: true, oursTx: true, oursTx32: true, oursTx8: true, oursBatch: true,
	oursCaller: true, oursOnCommit: true,
}

// needsRedis are those that do not run without it.
var needsRedis = map[string]bool{goRedisLua: true, rueidisLua: true}

// openHarness decides nothing: its figure is the cost of the measurement itself.
func openHarness(context.Context, *env, workload) (contender, error) {
	return contender{decide: func(context.Context, string) (bool, error) { return true, nil }}, nil
}

// opener makes an implementation ready for a workload.
type opener func(ctx context.Context, e *env, w workload) (contender, error)

// contender decides, for many goroutines at once.
type contender struct {
	decide func(ctx context.Context, key string) (granted bool, err error)
	close  func() // may be nil
}

// empty asks once for every key, if they are to be empty: it takes the one token, as these
// limits have a capacity of one, or has the refusal remembered.
func (c contender) empty(ctx context.Context, w workload) error {
	if !w.empty {
		return nil
	}
	err := lab.Each(busy, func(i int) (err error) {
		for k := i; k < len(w.keys) && err == nil; k += busy {
			_, err = c.decide(ctx, w.keys[k])
		}
		return err
	})
	if err != nil {
		c.close()
		return fmt.Errorf("taking what is there: %w", err)
	}
	return nil
}

// workload is the calls to make.
type workload struct {
	limit ratelimit.TokenBucket // its Name is one per implementation and case
	keys  []string
	empty bool // the keys have no tokens to begin with
	hasty bool // not about speed, so where every decision is a commit, none waits for the disk
}

// kind is how a case is measured.
type kind int

const (
	kindThroughput kind = iota
	kindOverGrant
	kindChurn
)

// testCase is a workload for several implementations.
type testCase struct {
	name   string
	title  string
	per    string // the unit that is counted per decision
	kind   kind
	keys   int
	empty  bool
	limit  ratelimit.TokenBucket
	levels []int
	impls  []string

	network time.Duration // before the servers: a round trip takes so much longer
}

var (
	plenty  = ratelimit.TokenBucket{Rate: 1e9, Period: time.Second, Capacity: 6e10}
	nothing = ratelimit.TokenBucket{Rate: 1, Period: 24 * time.Hour}
	ten     = ratelimit.TokenBucket{Rate: 10, Period: time.Second}
)

// escrow is for how long prefetched tokens are handed out.
const escrow = 100 * time.Millisecond

const busy = 64 // goroutines where only one number of them is of interest

// allCases returns the cases, with these numbers of goroutines where more than one
// is of interest.
func allCases(levels []int) []testCase {
	own := []string{
		oursEscrow, oursCombined, oursHasty, oursPortable, portableEscrow, oneUpsert, plainUpdate, forUpdate, serializable,
		goRedisLua, rueidisLua, harness,
	}
	own10k := []string{
		oursEscrow, oursCombined, serverBound, oursPortable, portableEscrow, oneUpsert, plainUpdate, forUpdate, serializable,
		goRedisLua, rueidisLua,
	}
	refused := []string{oursEscrow, oursCombined, oursPortable, portableEscrow, forUpdate, goRedisLua, rueidisLua, harness}
	inTx := []string{noLimit, bareUpsert, keyUpsert, oursTxEscrow, oursTx, oursCaller, oursOnCommit, oursBatch, oursTx32, forUpdateTx, serializableTx}
	exact := []string{
		oursCombined, oursEscrow, oursHasty, oursPortable, portableEscrow, oneUpsert,
		oursTxEscrow, oursTx, oursCaller, oursOnCommit, oursBatch, oursTx8, // a shard needs a capacity of one
		forUpdate, serializable, forUpdateTx, serializableTx, readCommitted,
		goRedisLua, rueidisLua,
	}
	churning := []string{oursEscrow, oursCombined, oneUpsert}
	far := []string{oursEscrow, oursCombined, plainUpdate, goRedisLua, rueidisLua}
	farTx := []string{noLimit, oursTxEscrow, oursTx, oursTx32, forUpdateTx}
	one, two := []int{busy}, []int{1, busy}
	return []testCase{
		{grantedOneKey, "Granted, one key", "trips", kindThroughput, 1, false, plenty, levels, own, 0},
		{granted10k, "Granted, 10,000 keys", "trips", kindThroughput, 10_000, false, plenty, levels, own10k, 0},
		{refusedOneKey, "Refused, one key", "trips", kindThroughput, 1, true, nothing, levels, refused, 0},
		{refused10k, "Refused, 10,000 keys", "trips", kindThroughput, 10_000, true, nothing, one, refused, 0},
		{txOneKey, "Transactions with one INSERT, one key", "retries", kindThroughput, 1, false, plenty, levels, inTx, 0},
		{tx10k, "Transactions with one INSERT, 10,000 keys", "retries", kindThroughput, 10_000, false, plenty, one, inTx, 0},
		{overGrant, "Over-grant: burst 10, 10 a second", "trips", kindOverGrant, 1, false, ten, one, exact, 0},
		{churnOneKey, "Churn, one key", "writes", kindChurn, 1, false, plenty, one, churning, 0},
		{churn10k, "Churn, 10,000 keys", "writes", kindChurn, 10_000, false, plenty, one, churning, 0},
		{grantedOneKeyFar, "Granted, one key", "trips", kindThroughput, 1, false, plenty, two, far, time.Millisecond},
		{txOneKeyFar, "Transactions with one INSERT, one key", "retries", kindThroughput, 1, false, plenty, two, farTx, time.Millisecond},
	}
}

// job is one implementation in one case with one number of goroutines.
type job struct {
	testCase
	goroutines int
	impl       string
}

func (j job) String() string { return fmt.Sprintf("%s/%d/%s", j.name, j.goroutines, j.impl) }

// selectJobs returns all jobs that only finds, in the order of the cases.
func selectJobs(cases []testCase, only *regexp.Regexp) []job {
	var jobs []job
	for _, c := range cases {
		for _, goroutines := range c.levels {
			for _, impl := range c.impls {
				j := job{c, goroutines, impl}
				if only == nil || only.MatchString(j.String()) {
					jobs = append(jobs, j)
				}
			}
		}
	}
	return jobs
}

// workload returns the workload of an implementation. Each has a limit name of its own, so that
// none finds another's rows.
func (c testCase) workload(impl string) workload {
	w := workload{limit: c.limit, keys: userKeys(c.keys), empty: c.empty, hasty: c.kind == kindChurn}
	w.limit.Name = c.name + "/" + impl
	return w
}

// userKeys returns so many keys.
func userKeys(n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("user-%05d", i)
	}
	return keys
}
