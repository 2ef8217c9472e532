package tx

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Queued is a take in a caller's batch: a statement for each limit, in the one order of locks.
type Queued struct {
	Result ratelimit.Result // set when all statements have taken

	taker    *Taker
	modes    *decide.Modes // nil if no limit has a mode
	call     decide.Call
	changes  []decide.Change
	taken    []table.Taken
	marks    []string // of each statement, for the error of its refusal
	read     int      // statements that have taken, or refused in ModeShadow
	reported bool     // the end has been reported
	report   func(*ratelimit.Result, error)
}

// Queue puts a take for requests into a batch. report is called at the end of each run of the
// batch, once.
func (b *Taker) Queue(batch *pgx.Batch, requests []ratelimit.Request, report func(*ratelimit.Result, error)) (*Queued, error) {
	q := &Queued{taker: b, report: report}
	if err := q.of(requests); err != nil {
		return nil, err
	}
	q.put(batch)
	return q, nil
}

// of sets q to the take for requests, and checks everything that can be checked before it is
// queued.
func (q *Queued) of(requests []ratelimit.Request) error {
	if !decide.Moded(requests) {
		return q.ofEnforced(requests)
	}
	m, err := decide.NewModes(decide.All, q.taker.Instant(), requests)
	if err != nil {
		return err
	}
	q.modes = m
	result, err := m.Decide(func(left []ratelimit.Request) (result ratelimit.Result, err error) {
		result.OK = true // the batch decides
		if len(left) > 0 {
			err = q.ofEnforced(left)
		}
		return result, err
	})
	if err == nil && !result.OK {
		result = m.Report(result)
		err = result.Err()
	}
	return err
}

// ofEnforced sets q to the take for requests without modes.
func (q *Queued) ofEnforced(requests []ratelimit.Request) (err error) {
	if q.call, err = q.taker.known.Definitions.Call(decide.All, false, nil, requests); err != nil {
		return err
	}
	for i := range q.call.Demands {
		d := &q.call.Demands[i].Definition
		if field, value := q.taker.table.Unqueueable(d); field != "" {
			return &ratelimit.FieldError{Limit: d.Name, Field: field, Value: value, Reason: "cannot be taken from in a batch: use AllowTx or AllowFunc"}
		}
	}
	return nil
}

// put puts the statements of the take into a batch, and forgets an earlier batch.
func (q *Queued) put(batch *pgx.Batch) {
	q.begin()
	q.changes, q.marks = nil, nil
	if len(q.call.Demands) == 0 { // all are in ModeShadow, and can never grant
		q.Result = q.assumed()
		q.tell(&q.Result, nil)
		return
	}
	own := rand.Uint64() // makes marks that no other error's text contains
	for i := range q.call.Demands {
		a := &q.call.Demands[i]
		q.changes = append(q.changes, a.Change(i, 0, a.Count))
		q.marks = append(q.marks, fmt.Sprintf("ratelimit refused %016x.%d", own, i))
	}
	q.taken = make([]table.Taken, len(q.changes))
	now := q.taker.Clock()
	for i := range q.changes {
		mark := q.marks[i]
		if q.modes != nil && q.modes.InShadow(q.call.Demands[i].KeyOf()) {
			mark = ""
		}
		q.taker.table.QueueMust(batch, &q.changes[i], mark, now, &q.taken[i], func(session any, err error) error { return q.done(i, session, err) })
	}
}

// assumed returns a granted result, as far as it is known before the answers of the statements.
func (q *Queued) assumed() (result ratelimit.Result) {
	if result.OK = true; len(q.call.Demands) > 0 {
		result.Request, result.Capacity = q.call.Demands[0].Request, q.call.Demands[0].Definition.Capacity
	}
	if q.modes != nil {
		result = q.modes.Report(result)
	}
	return result
}

// done notes the end of a statement; session is its connection. With the last statement it sets the
// result.
func (q *Queued) done(i int, session any, err error) error {
	if i == 0 {
		q.begin()
	}
	if err != nil {
		refusal := q.Err(err)
		if refusal == err {
			refusal = q.taker.faultOf(&q.call, err)
			q.tell(&ratelimit.Result{}, refusal)
		}
		return refusal
	}
	if q.read++; q.read < len(q.changes) {
		return nil
	}
	changes := make([]decide.Change, 0, len(q.changes))
	at, xid := q.taken[0].At, ""
	for i := range q.changes {
		taken := &q.taken[i]
		at = bucket.Later(at, taken.At)
		if taken.OK {
			xid = taken.Xid
			q.changes[i].After = taken.After
			changes = append(changes, q.changes[i])
			q.taker.known.Changed(q.changes[i].Key)
		}
	}
	if at.IsZero() { // all are in ModeShadow, and have refused
		at = q.taker.Instant()
	}
	q.Result = q.call.Partly(changes, at.UTC(), xid, session)
	if q.modes != nil {
		q.Result = q.modes.Report(q.Result)
	}
	q.tell(&q.Result, nil)
	return nil
}

// begin forgets an earlier run of the batch.
func (q *Queued) begin() { q.Result, q.read, q.reported = ratelimit.Result{}, 0, false }

// tell reports the end, once.
func (q *Queued) tell(result *ratelimit.Result, err error) {
	if !q.reported {
		q.report(result, err)
	}
	q.reported = true
}

// Err returns the refusal if err is a refusal by q, otherwise err.
func (q *Queued) Err(err error) error {
	refusal := q.refusal(err)
	if refusal != err {
		q.tell(&ratelimit.Result{}, refusal)
	}
	return refusal
}

func (q *Queued) refusal(err error) error {
	var refused *ratelimit.RefusedError
	if errors.As(err, &refused) {
		return err
	}
	for i, mark := range q.marks {
		state, at, ok := table.Refusal(err, mark)
		if !ok {
			continue
		}
		result, ok := q.call.RefusedBy(i, state, at)
		if !ok || at.IsZero() {
			return fmt.Errorf("pgstore: limit %s was not decided in a batch, where its row is far behind or this machine's clock off: use AllowTx",
				strconv.Quote(q.call.Demands[i].Definition.Name))
		}
		if q.modes != nil {
			result = q.modes.Report(result)
		}
		return result.Err()
	}
	return err
}
