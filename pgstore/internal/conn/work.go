package conn

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
)

// Work counts the calls that Close waits for. All calls pass here, and each writes this one number
// twice; a lock and a sync.WaitGroup would write shared memory four times.
type Work struct {
	underWay       atomic.Int64 // how much is under way; by closing less when nothing more is to begin
	closing, ended sync.Once
	over           chan struct{} // closed when nothing is under way then

	Opened context.Context // ends when nothing more is to begin
	shut   context.CancelFunc
}

const closing = math.MinInt64 / 2

func (w *Work) open() {
	w.over = make(chan struct{})
	w.Opened, w.shut = context.WithCancel(context.Background())
}

// Begin counts a call, which must End unless there is an error: ErrClosed.
func (w *Work) Begin(ctx context.Context) error {
	if w.underWay.Add(1) > 0 || ctx.Value(w) != nil {
		return nil
	}
	w.End()
	return ErrClosed
}

// BeginSpan begins something of several parts, such as a wait. Its context ends when the Store is
// closed, but its parts, which have w in theirs, begin all the same.
func (w *Work) BeginSpan(ctx context.Context) (_ context.Context, end func(), err error) {
	if err := w.Begin(ctx); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(w.Part(ctx))
	stop := context.AfterFunc(w.Opened, cancel)
	return ctx, func() { stop(); cancel(); w.End() }, nil
}

// Part returns a context whose calls begin also when the Store is closed.
func (w *Work) Part(ctx context.Context) context.Context { return context.WithValue(ctx, w, true) }

// End ends a call that has begun.
func (w *Work) End() {
	if w.underWay.Add(-1) == closing {
		w.ended.Do(func() { close(w.over) })
	}
}

// Spawn starts a goroutine for work that was begun.
func (w *Work) Spawn(f func()) {
	w.underWay.Add(1)
	go func() {
		defer w.End()
		f()
	}()
}

// UnderWay returns how much is under way, also when nothing more is to begin.
func (w *Work) UnderWay() int64 {
	n := w.underWay.Load()
	if n < 0 {
		n -= closing
	}
	return n
}

// Close has nothing more begin, and returns when nothing is under way.
func (w *Work) Close() {
	w.closing.Do(func() {
		w.shut()
		w.underWay.Add(closing + 1)
		w.End()
	})
	<-w.over
}
